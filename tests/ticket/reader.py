"""A second reader of ticket files, written from docs/format.md alone: NumPy and the standard library, nothing of mptify."""

import hashlib
import json
import math

import numpy as np

TYPES = {"U8": "u1", "F16": "<f2", "F32": "<f4", "F64": "<f8"}


class Refused(Exception):
    pass


def require(condition, text):
    if not condition:
        raise Refused(text)


def read(data):
    """{"description": ..., "masks": {name: ...}, "weights": {name: ...}, "floats": {name: ...}}"""
    length = int.from_bytes(data[:8], "little")
    require(length <= 2**24, "header")
    header = json.loads(data[8 : 8 + length])
    description = json.loads(header.pop("__metadata__")["mptify"])
    require(description["version"] == 2, "version")
    sections = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        sections[name] = np.frombuffer(
            data[8 + length + begin : 8 + length + end], TYPES[entry["dtype"]]
        )
    digest = hashlib.sha256()
    plain = {key: value for key, value in description.items() if key != "sha256"}
    plain["layers"] = [row[:4] for row in description["layers"]]
    digest.update(
        json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    )

    masks, weights, floats = {}, {}, {}
    at = signs_at = values_at = 0
    config = description["config"]
    for (name, shape, kept, origin, size), gain in zip(
        description["layers"], sections["gains"], strict=True
    ):
        coded = sections["masks"][at : at + size].tobytes()
        at += size
        mask = read_mask(coded, shape, config["seed"], name)
        require(mask.sum() == kept, "survivors")
        values = None
        if origin == "seed":
            negative = drawn_signs(config["seed"], name, mask.size)[mask]
        elif origin == "signs":
            packed = sections["signs"][signs_at : signs_at + -(-kept // 8)]
            signs_at += packed.size
            negative = unpacked(packed, kept)
        else:
            values = sections["values"][values_at : values_at + kept]
            values_at += kept
            negative = np.signbit(values)
        full = np.zeros(mask.size, np.float32)
        if config["bits"].startswith("1/"):
            full[mask] = np.where(negative, -gain, gain)
        elif values is not None:
            full[mask] = values
        else:
            require(config["init"] == "signed_constant", "this reader draws no normals")
            full[mask] = np.where(negative, -gain, gain)
        masks[name], weights[name] = mask.reshape(shape), full.reshape(shape)
        for part in (
            packed_bits(mask),
            packed_bits(negative),
            gain.tobytes(),
            b"" if values is None else values.tobytes(),
        ):
            digest.update(part)
    require(at == sections["masks"].size, "masks")

    at = 0
    kind = {2: "<f2", 4: "<f4", 8: "<f8"}[description["float_bytes"]]
    for name, shape, *constant in description["floats"]:
        if constant:
            floats[name] = np.full(shape, constant[0], kind)
        else:
            floats[name] = sections["floats"][at : at + math.prod(shape)].reshape(shape)
            at += math.prod(shape)
        digest.update(floats[name].tobytes())
    require(digest.hexdigest() == description["sha256"], "digest")
    return {"description": description, "masks": masks, "weights": weights, "floats": floats}


def packed_bits(bits):
    return np.packbits(bits, bitorder="little").tobytes()


def unpacked(packed, count):
    bits = np.unpackbits(np.asarray(packed, np.uint8), bitorder="little")
    require(bits.size - count in range(8) and not bits[count:].any(), "bits")
    return bits[:count].astype(bool)


def drawn_words(seed, name, purpose, count):
    key = int.from_bytes(
        hashlib.sha256(f"mptify 1\n{seed}\n{name}\n{purpose}".encode()).digest()[:16], "little"
    )
    return np.random.Philox(key=key).random_raw(count)


def drawn_levels(seed, name, count):
    index = np.arange(count)
    words = drawn_words(seed, name, "scores", -(-count // 2))[index // 2]
    top = (words >> (32 * (index % 2) + 24).astype(np.uint64) & np.uint64(255)).astype(int)
    return np.where(top >= 128, top - 128, 127 - top)


def drawn_signs(seed, name, count):
    words = drawn_words(seed, name, "signs", -(-count // 64))
    index = np.arange(count)
    return (words[index // 64] >> (index % 64).astype(np.uint64) & np.uint64(1)).astype(bool)


# -- masks -----------------------------------------------------------------------------------------------------------------


def read_mask(coded, shape, seed, name):
    count = math.prod(shape)
    way, rest = coded[0], coded[1:]
    require(count <= {0: 8, 1: 1024, 2: 256}[way] * len(coded), "huge")
    if way == 0:
        return unpacked(np.frombuffer(rest, np.uint8), count)
    if way == 2:
        return read_initial_scores(rest, drawn_levels(seed, name, count))
    coder = Coder(rest[2:])
    mask = unpacked(coder.pop(int.from_bytes(rest[:2], "little"), -(-count // 8)), count)
    coder.finish()
    return mask


def read_initial_scores(rest, levels):
    classes = 2 ** rest[0]
    require(2 <= classes <= 128, "classes")
    densities, coder = (
        np.frombuffer(rest[1 : 1 + 2 * classes], "<u2").tolist(),
        Coder(rest[1 + 2 * classes :]),
    )
    mask = np.zeros(levels.size, bool)
    for start in range(0, levels.size, 131072):
        block = levels[start : start + 131072] * classes // 128
        for number, density in enumerate(densities):
            where = start + np.flatnonzero(block == number)
            packed = np.array(coder.pop(density, -(-where.size // 8)), np.uint8)
            mask[where] = unpacked(packed if density < 32768 else ~packed, where.size) ^ (
                density >= 32768
            )
    coder.finish()
    return mask


class Coder:
    def __init__(self, rest):
        self.words = np.frombuffer(rest, "<u4").tolist()
        while self.words and not self.words[-1]:
            self.words.pop()
        self.state = 0
        self.refill()

    def refill(self):
        while self.state < 2**32 and self.words:
            self.state = self.state << 32 | self.words.pop()

    def pop(self, density, count):
        weights = [
            (2**24 - 256) * density**k * (65536 - density) ** (8 - k) >> 128
            for k in (bin(b).count("1") for b in range(256))
        ]
        weights[0 if density < 32768 else 255] += 2**24 - 256 - sum(weights)
        starts = np.cumsum([0, *(weight + 1 for weight in weights)])
        found = []
        for _ in range(count):
            number = self.state % 2**24
            byte = int(np.searchsorted(starts, number, side="right")) - 1
            self.state = (self.state >> 24) * (weights[byte] + 1) + number - int(starts[byte])
            self.refill()
            found.append(byte)
        return found

    def finish(self):
        require(not self.state and not self.words, "coder")
