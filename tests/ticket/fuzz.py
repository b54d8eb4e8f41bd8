"""Mutated ticket files, by the ten thousand: `python -m tests.ticket.fuzz --files 20000 --seed 1`.

Each must be refused with a `MptifyError` or decode to exactly the ticket it was made from, in less than a second and
200 MB. Files that are signed again after the change, as someone with bad intent would, may be other tickets; for them
the rest holds all the same. Prints the number of files and of refusals; anything else that happens is an exception.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from mptify.errors import MptifyError
from mptify.ticket import codec as ticket_format
from mptify.ticket.codec import from_bytes, to_bytes
from tests.helpers.tickets import TICKETS

SECONDS, BYTES = 1.0, 200 << 20
NASTY_NUMBERS = [
    0,
    1,
    -1,
    255,
    2**16,
    2**20,
    2**31,
    2**31 - 1,
    2**32,
    2**40,
    2**63,
    2**64,
    10**30,
    0.5,
    1e308,
    True,
    None,
]
NASTY_TEXTS = [
    "",
    "../../../etc/passwd",
    "conv",
    "a" * 600,
    "\0",
    "__class__",
    "hf-hub:evil/model",
    "os.system",
    "\ud800",
    "config",
]


def parts(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def whole(header, body):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def flipped(data, rng):
    changed = bytearray(data)
    for _ in range(rng.integers(1, 9)):
        changed[rng.integers(len(changed))] ^= 1 << rng.integers(8)
    return bytes(changed)


def cut(data, rng):
    return data[: rng.integers(len(data))]


def longer(data, rng):
    return data + rng.bytes(rng.integers(1, 40))


def overwritten(data, rng):
    at = rng.integers(len(data))
    return data[:at] + rng.bytes(rng.integers(1, 12)) + data[at + rng.integers(12) :]


def swapped(data, rng):
    a, b, c = sorted(rng.integers(8, len(data), 3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def digits(data, rng):
    """Another digit somewhere in the header."""
    header = int.from_bytes(data[:8], "little")
    places = [at for at in range(8, 8 + header) if chr(data[at]).isdigit()]
    at = places[rng.integers(len(places))]
    return data[:at] + str(rng.integers(10)).encode() + data[at + 1 :]


def container(data, rng):
    """The safetensors header: types, shapes, offsets and names of sections."""
    header, body = parts(data)
    name = list(header)[rng.integers(len(header))]
    if name == "__metadata__":
        header[name] = [{}, {"mptify": "{}"}, {"mptify": "[" * 50_000}, {"mptify": "1"}, []][
            rng.integers(5)
        ]
    else:
        key, nasty = [
            ("dtype", ["F64", "U8", "I8", "BF16", "F8_E4M3", "BOOL", "X"]),
            ("shape", [[0], [1, 1], [2**40], [-1], []]),
            ("data_offsets", [[0, 0], [0, 2**40], [5, 1], [0, len(body)]]),
        ][rng.integers(3)]
        header[name] = header[name] | {key: nasty[rng.integers(len(nasty))]}
    return whole(header, body)


def described(data, rng):
    """A nasty value anywhere in the description."""
    header, body = parts(data)
    description = json.loads(header["__metadata__"]["mptify"])
    _poison(description, rng)
    header["__metadata__"]["mptify"] = json.dumps(description)
    return whole(header, body)


def _poison(value, rng):
    nasty = [*NASTY_NUMBERS, *NASTY_TEXTS, [], {}, [[]], {"a": 1}]
    for _ in range(20):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        if not len(keys):
            return
        key = keys[rng.integers(len(keys))]
        if isinstance(value[key], (dict, list)) and rng.random() < 0.8:
            value = value[key]
            continue
        choice = rng.integers(5)
        if choice == 0 and isinstance(value, dict):
            value[NASTY_TEXTS[rng.integers(len(NASTY_TEXTS))]] = 1
        elif choice == 1 and isinstance(value, list):
            value.append(value[key])  # twice
        elif choice == 2:
            del value[key]
        else:
            value[key] = nasty[rng.integers(len(nasty))]
        return


def signed_again(data, rng):
    """Changed by someone who knows the format: the digest fits what the file says."""
    changed = [described, flipped_body, bomb][rng.integers(3)](data, rng)
    try:
        header, body = parts(changed)
        description = json.loads(header["__metadata__"]["mptify"])
        kept = {}

        def remember(plain, ticket):
            kept["sha256"] = true_digest(plain, ticket)
            return kept["sha256"]

        true_digest, ticket_format._digest = ticket_format._digest, remember
        try:
            from_bytes(changed)
        finally:
            ticket_format._digest = true_digest
    except (MptifyError, ValueError):
        pass
    if not kept.get("sha256"):
        return changed
    description["sha256"] = kept["sha256"]
    header["__metadata__"]["mptify"] = json.dumps(description)
    return whole(header, body)


def flipped_body(data, rng):
    length = 8 + int.from_bytes(data[:8], "little")
    return data[:length] + flipped(data[length:], rng)


def bomb(data, rng):
    """A layer that claims to be as large as it may, from a stream that says nothing but zeros, at the lowest density."""
    header, body = parts(data)
    description = json.loads(header["__metadata__"]["mptify"])
    layer = description["layers"][0]
    layer[1] = (
        [int(rng.integers(1, 2**31)), int(rng.integers(1, 2**12))]
        if rng.random() < 0.5
        else [1024 * layer[4]]
    )
    layer[2] = 1
    begin = header["masks"]["data_offsets"][0]
    head = bytes([1, 1, 1, 1, 1, 0]) if rng.random() < 0.5 else bytes([3, 1, 1, 0, 1, 0])
    blob = head + bytes(max(0, layer[4] - 6))
    header["__metadata__"]["mptify"] = json.dumps(description)
    return whole(header, body[:begin] + blob[: layer[4]] + body[begin + layer[4] :])


def many(data, rng):
    """Thousands of layers or tensors, each of which could pass alone, and a mask in classes that is as large as it may be."""
    header, body = parts(data)
    description = json.loads(header["__metadata__"]["mptify"])
    way = rng.integers(4)
    if way == 0:
        description["floats"] = [[f"a{number}", [1 << 20], 1.0] for number in range(2000)]
        header["__metadata__"]["mptify"] = json.dumps(description)
        return whole(header, body)
    length, layers, per_byte = [(1032, 300, 1024), (20_000, 1, 1024), (60_000, 1, 256)][way - 1]
    head = [
        bytes([1, 1, 1, 1, 1, 0]),
        bytes([1, 1, 2, 1, 0x10, 1, 0, 1, 0]),
        bytes([3, 7] + 128 * [1, 0]),
    ][way - 1]
    blob = head + bytes((length - len(head)) // 4 * 4)
    count = per_byte * len(blob)
    origin = description["layers"][0][3]
    description["layers"] = [
        [f"a{n}", [count // 2, 2], 1, origin, len(blob)] for n in range(layers)
    ]
    sections = {
        "masks": ("U8", blob * layers),
        "gains": ("F32", bytes(4 * layers)),
        "signs": ("U8", bytes(layers)),
        "values": ("F32", bytes(4 * layers)),
    }
    new, at, parts_of = {"__metadata__": {"mptify": json.dumps(description)}}, 0, []
    for name, (kind, content) in sections.items():
        size = len(content) // (4 if kind == "F32" else 1)
        new[name] = {"dtype": kind, "shape": [size], "data_offsets": [at, at + len(content)]}
        at += len(content)
        parts_of.append(content)
    return whole(new, b"".join(parts_of))


MUTATORS = [
    flipped,
    cut,
    longer,
    overwritten,
    swapped,
    digits,
    container,
    described,
    signed_again,
    bomb,
]


def check(data, original, may_differ):
    """True if the file was refused."""
    before = time.process_time()  # its own work: other processes may keep it waiting
    try:
        found = from_bytes(data)
    except MptifyError:
        refused = True
    else:
        refused = False
        assert may_differ or found == original, "another ticket came out"
    took = time.process_time() - before
    assert took < SECONDS, f"took {took:.2f} s"
    return refused


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--files", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    originals = [(ticket, to_bytes(ticket)) for ticket in TICKETS.values()]
    for _, data in originals:
        from_bytes(data)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
    rng = np.random.default_rng(given.seed)
    refused = 0
    for number in range(given.files):
        ticket, data = originals[rng.integers(len(originals))]
        mutate = many if number % 200 == 0 else MUTATORS[number % len(MUTATORS)]
        changed = mutate(data, rng)
        try:
            refused += check(changed, ticket, mutate is signed_again)
        except BaseException:
            (Path(tempfile.gettempdir()) / "mptify_fuzz_failure.bin").write_bytes(changed)
            raise
    print(f"{given.files} files, {refused} refused, the others unchanged or signed again")


if __name__ == "__main__":
    main()
