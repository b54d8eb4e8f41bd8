"""Packed files of layers on lanes: what no writer would write is refused, and nothing crashes."""

import random
from functools import partial

import pytest
import torch

import mptify
from mptify.errors import DamagedTicket, MptifyError, TicketMismatch
from mptify.runtime import packed_file as packed_files
from mptify.runtime.library import library
from tests.helpers.packed_files import fill, fill_one, packed_file, rewritten, set_in

pytestmark = [
    pytest.mark.skipif(library is None, reason="this machine has no C++ compiler"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
CONV, LINEAR = "features_2", "classifier_1"
NAN, INFINITE = float("nan"), float("inf")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of a Conv-2 with norms and biases, by bits; and an image."""
    found = {}
    for bits in ("1/4", "1/8", "1/32"):
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(bits.replace("/", "_"))
        settings = {"bn": "insert"} if bits != "1/4" else {}
        path, x = packed_file("mptify:conv2", folder, bits, bias="learn", **settings)
        found[bits] = path, x
    return found


def put(name, tensor):
    return lambda description, tensors: tensors.update({name: tensor})


def drop(name):
    return lambda description, tensors: tensors.pop(name)


def both(*changes):
    def change(description, tensors):
        for one in changes:
            one(description, tensors)

    return change


def conv(name):
    return f"kernel.{CONV}.{name}"


def linear(name):
    return f"kernel.{LINEAR}.{name}"


KERNEL = ("kernels", CONV)
HOSTILE = {
    "a scale that is no number": (fill(conv("scale"), NAN), "its scale is not finite"),
    "an infinite scale": (fill(conv("scale"), INFINITE), "its scale is not finite"),
    "two scales": (put(conv("scale"), torch.ones(2)), "its scale is not 1 float32 number"),
    "a scale of another type": (put(conv("scale"), torch.ones(1).half()), "its scale is not 1"),
    "no scale": (drop(conv("scale")), "it has no scale"),
    "a norm that is no number": (fill_one(conv("alpha"), 3, NAN), "its alpha is not finite"),
    "a norm of other filters": (put(conv("alpha"), torch.ones(3)), "its alpha is not 64 float32"),
    "half a norm": (drop(conv("beta")), "one of alpha and beta without the other"),
    "a norm too many": (
        both(put(conv("last_alpha"), torch.ones(64)), put(conv("last_beta"), torch.ones(64))),
        "can't replace this layer",
    ),
    "no norm": (both(drop(conv("alpha")), drop(conv("beta"))), "does not fit"),
    "a bias too many": (put(conv("bias"), torch.ones(64)), "can't replace this layer"),
    "biases of other filters": (put(conv("bias"), torch.ones(65)), "its bias is not 64 float32"),
    "a range upside down": (
        put(conv("range"), torch.tensor([6.0, 0.0])),
        "its range is not a lowest and a highest",
    ),
    "a range that is no number": (put(conv("range"), torch.tensor([0.0, NAN])), "its range is not"),
    "another range": (put(conv("range"), torch.tensor([0.0, 6.0])), "can't replace this layer"),
    "levels that no quantizer has": (
        put(conv("levels"), torch.tensor([0.0, 1e9, 1.0])),
        "no quantizer has levels from 0.0 to 1000000000.0",
    ),
    "levels that are no numbers": (fill(conv("levels"), NAN), "its levels is not finite"),
    "levels of another quantizer": (
        put(conv("levels"), torch.tensor([-127.0, 127.0, 1.0])),
        "can't replace this layer",
    ),
    "no levels": (drop(conv("levels")), "can't replace this layer"),
    "a unit of nothing": (put(conv("levels"), torch.tensor([0.0, 255.0, 0.0])), "which no step is"),
    "rounding without a reader": (
        put("kernel.features_0.rounding", torch.tensor([1.0, -127.0, 127.0])),
        "can't replace this layer",
    ),
    "rounding by infinity": (
        put(conv("rounding"), torch.tensor([INFINITE, 0.0, 255.0])),
        "its rounding is not finite",
    ),
    "rounding by less than nothing": (
        put(conv("rounding"), torch.tensor([-1.0, 0.0, 255.0])),
        "which no step is",
    ),
    "numbers that are added as levels": (
        put(conv("other_step"), torch.tensor(1.0)),
        "can't replace this layer",
    ),
    "weights of another size": (
        put(conv("weights"), torch.zeros(64, 2, 71, dtype=torch.uint8)),
        "two bits for each weight",
    ),
    "weights of another type": (
        put(conv("weights"), torch.zeros(64, 2, 72)),
        "two bits for each weight",
    ),
    "survivors that are not there": (
        set_in(*KERNEL, "survivor_count", 7),
        "other survivors than it says",
    ),
    "signs of what is pruned": (
        fill_one(conv("weights"), (slice(None), 1), 255),
        "other survivors than it says",
    ),
    "other filters": (set_in(*KERNEL, "filters", 32), "do not divide into groups"),
    "no filters": (set_in(*KERNEL, "filters", 0), "sizes do not fit each other"),
    "no weights": (set_in(*KERNEL, "weight_count", 0), "sizes do not fit each other"),
    "other weights": (set_in(*KERNEL, "weight_count", 1 << 30), "do not|two bits"),
    "a weight less": (set_in(*KERNEL, "weight_count", 64 * 64 * 9 - 1), "sizes do not fit"),
    "weights of another count of bytes": (set_in(*KERNEL, "weight_bytes", 3), "another size"),
    "channels that do not divide": (
        set_in(*KERNEL, "geometry", 0, 65),
        "do not divide into groups",
    ),
    "groups": (set_in(*KERNEL, "geometry", 0, 128), "can't replace this layer"),
    "another kernel size": (
        set_in(*KERNEL, "geometry", [1, [32, 32], [24, 24], [1, 1], [1, 1], [1, 1]]),
        "can't replace this layer",
    ),
    "another stride": (set_in(*KERNEL, "geometry", 3, [2, 2]), "can't replace this layer"),
    "another padding": (set_in(*KERNEL, "geometry", 4, [0, 0]), "can't replace this layer"),
    "a huge padding": (set_in(*KERNEL, "geometry", 4, [1 << 20, 1]), "is not a size"),
    "tokens": (set_in(*KERNEL, "tokens", True), "it is no linear layer on tokens"),
    "a number for a flag": (set_in(*KERNEL, "fused", 3), "is not of type bool"),
    "a kernel of another kind": (
        lambda d, t: d["kernels"].update({CONV: d["kernels"][LINEAR]}),
        "it has no|two bits",
    ),
    "a layer on signs": (
        lambda d, t: d["kernels"].update({CONV: d["kernels"][CONV] | {"kernel": "popcount_conv"}}),
        "masks and signs|can't replace",
    ),
    "no kernel": (lambda d, t: d["kernels"].pop(CONV), None),
    "a kernel without a place": (
        lambda d, t: (
            d["kernels"].update(other=d["kernels"][CONV]),
            t.update(
                {name.replace(CONV, "other"): t[name].clone() for name in list(t) if CONV in name}
            ),
        ),
        "no layer for other",
    ),
    "a vector's masks that overlap": (
        lambda d, t: t[linear("weights")].copy_(t[linear("weights")][:, :1].expand(-1, 2, -1)),
        "other survivors than it says",
    ),
    "a vector's masks of another size": (
        put(linear("weights"), torch.zeros(256, 2, 8, dtype=torch.uint8)),
        "two bits for each weight",
    ),
    "a vector's other length": (set_in("kernels", LINEAR, "inputs", 64), "do not fit|two bits"),
    "a vector of no length": (set_in("kernels", LINEAR, "inputs", 0), "sizes do not fit"),
    "a vector's levels": (
        put(linear("levels"), torch.tensor([1.0, 0.0, 16.0])),
        "no quantizer has levels from 0.0 to 16.0",
    ),
    "a vector's rounding by another step": (
        put(linear("levels"), torch.tensor([1.0, 0.0, 255.0])),
        "can't replace this layer",
    ),
    "a vector's biases": (put(linear("bias"), torch.ones(2)), "its bias is not 256 float32"),
    "a vector's scale": (fill(linear("scale"), NAN), "its scale is not finite"),
    "a quantizer's other range": (
        fill("state.features.2.input_quantizer.running_high", 1e30),
        "can't replace this layer|which no step is",
    ),
    "a quantizer's range that is no number": (
        fill("state.classifier.1.input_quantizer.running_high", NAN),
        "can't replace this layer",
    ),
    "no range": (drop("state.features.2.input_quantizer.running_high"), "does not fit"),
    "rounded layers that are none": (set_in("rounded", ["features.9"]), "does not fit"),
    "rounded layers of other bits": (set_in("rounded", ["features.2"]), "not a layer of 1/32 bits"),
    "rounded layers that are no list": (set_in("rounded", 7), "does not fit"),
    "vectors for images": (
        lambda d, t: d["shapes"].update({name: [1, 5] for name in d["shapes"]}),
        "does not fit",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_writer_would_write_is_refused(what, files, tmp_path):
    change, message = HOSTILE[what]
    path, x = files["1/8"]
    path = rewritten(path, tmp_path / "a.packed", change)
    with (
        pytest.raises((DamagedTicket, TicketMismatch, MptifyError), match=message),
        torch.no_grad(),
    ):
        mptify.load(path)(x)


def test_sums_that_would_overflow_are_refused_before_they_run():
    from mptify.runtime.chain import Call, Chain
    from mptify.runtime.geometry import Geometry
    from mptify.runtime.kernels.lanes_conv import LanesConv
    from mptify.runtime.kernels.quantize import Quantize

    weight = torch.ones(2, 1, 24, 24, dtype=torch.int8)
    levels = (0.0, 255.0, 1.0)
    kernel = LanesConv(weight, Geometry(1, (32, 32), (24, 24)), torch.tensor(1.0), levels)
    calls = [Call("q", ("x",), "levels"), Call("k", ("levels",), "y")]
    chain = Chain({"q": Quantize(1.0, 0, 255), "k": kernel}, calls, ["x"], ["y"])
    with pytest.raises(MptifyError, match="k: A packed layer has more survivors than its lanes"):
        chain(torch.ones(1, 1, 32, 32))


@pytest.mark.parametrize("bits", ["1/4", "1/8", "1/32"])
def test_mutated_files_are_refused_or_run(bits, files, tmp_path):
    """Signed again after the change, as someone with bad intent would; nothing else may happen."""
    path, x = files[bits]
    description = packed_files.open_packed(path).description
    rng, refused = random.Random(0), 0
    for _ in range(80):
        change = rng.choice([poison_description, poison_tensor, drop_tensor, resize_tensor])
        changed = rewritten(path, tmp_path / "a.packed", partial(change, rng))
        try:
            with torch.no_grad():
                mptify.load(changed)(x[:1])
        except MptifyError:
            refused += 1
    assert refused > 30
    assert packed_files.open_packed(path).description == description


NASTY = [0, 1, -1, 2, 7, 255, 1 << 16, (1 << 30) + 1, 1 << 62, 0.5, True, None, "", [], {}]


def poison_description(rng, description, tensors):
    value = description[rng.choice(["kernels", "kernels", "shapes", "rounded", "kept", "input"])]
    for _ in range(4):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(value[key], (dict, list)) and value[key] and rng.random() < 0.9:
            value = value[key]
            continue
        value[key] = rng.choice(NASTY)
        return


def poison_tensor(rng, description, tensors):
    name = rng.choice(sorted(tensors))
    data = tensors[name].reshape(-1).view(torch.uint8).numpy()
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.choice([0, 1, 127, 128, 255])


def drop_tensor(rng, description, tensors):
    del tensors[rng.choice(sorted(tensors))]


def resize_tensor(rng, description, tensors):
    name = rng.choice(sorted(tensors))
    old = tensors[name]
    new = rng.choice(
        [old.reshape(-1), old[None], old.reshape(-1)[:1], old.reshape(-1)[:0], old.double()]
    )
    tensors[name] = new.clone() if new.is_contiguous() else new.contiguous()
