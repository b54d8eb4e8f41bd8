"""Packed files: the same program again, mapped; refused if damaged, or if they say what no kernel can do."""

import json
import random
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import mptify
from mptify.cli import app
from mptify.errors import DamagedTicket, MptifyError, TicketMismatch
from mptify.models import registry
from mptify.runtime import packed_file as packed_files
from mptify.runtime import packed_layers
from mptify.runtime.library import library
from tests.helpers.outputs import require_same
from tests.helpers.packed_files import fill, fill_one, packed_file, rewritten, set_in

pytestmark = [
    pytest.mark.skipif(library is None, reason="this machine has no C++ compiler"),
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
]
NETWORKS = ["mptify:conv2", "torchvision:resnet18", "torchvision:mobilenet_v2", "torchvision:squeezenet1_1", "timm:test_vit",
            "timm:test_efficientnet", "timm:test_convnext"]  # fmt: skip


BITS = ["1/1", "1/2", "1/4", "1/8", "1/32"]


@pytest.fixture(scope="module")
def conv2(tmp_path_factory):
    return packed_file("mptify:conv2", tmp_path_factory.mktemp("conv2"))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        *((name, "1/1") for name in NETWORKS),
        *(("mptify:conv2", bits) for bits in BITS[1:]),
        *(("timm:test_vit", bits) for bits in BITS[1:]),
        ("timm:test_efficientnet", "1/8"),
        ("timm:test_resnet", "1/4"),
        ("mptify:resnet18_cifar", "1/2"),
        ("mptify:resnet18_cifar", "1/32"),
        ("torchvision:mobilenet_v2", "1/8"),
        *(
            pytest.param(name, bits, marks=pytest.mark.long)
            for name in (*NETWORKS[1:], "timm:test_byobnet", "timm:test_mambaout")
            for bits in BITS[1:]
        ),
    ],
)
@pytest.mark.parametrize("learns", [False, True])
def test_the_program_is_the_same_again(name, bits, learns, tmp_path):
    settings = {"bias": "learn", "learn_bn": True} if learns else {}
    if learns and bits in ("1/2", "1/4"):
        settings["learn_clip"] = True
    path, x = packed_file(name, tmp_path, bits, **settings)
    program, made = mptify.load(path), mptify.load(tmp_path / "a.ticket", runtime="packed")
    with torch.no_grad():
        assert torch.equal(program(x), made(x))
        if bits == "1/1":
            require_same(program(x), mptify.load(tmp_path / "a.ticket")(x), program)
    assert [layer.weight_bytes for layer in packed_layers(program)] == [
        layer.weight_bytes for layer in packed_layers(made)
    ]
    assert {name: layer.kept for name, layer in mptify.ticket_layers(program).items()} == {
        name: layer.kept for name, layer in mptify.ticket_layers(made).items()
    }


@pytest.mark.parametrize("name", ["mptify:conv2", "mptify:resnet18_cifar", "timm:test_vit"])
def test_a_ticket_with_8_bit_inputs_is_the_same_again(name, tmp_path):
    torch.manual_seed(0)
    entry = registry.resolve(name)
    x = registry.example_inputs(entry, registry.build(entry))[0]
    exporting = {"activation_bits": 8, "calibrate": x}
    path, _ = packed_file(name, tmp_path, "1/32", exporting, bias="learn")
    program = mptify.load(path)
    made = mptify.pack(mptify.load(tmp_path / "a.ticket"), activation_bits=8, calibrate=x)
    with torch.no_grad():
        assert torch.equal(program(x), made(x))
        assert not torch.equal(program(x), mptify.load(tmp_path / "a.ticket")(x))


def test_weights_take_two_bits(tmp_path):
    for bits in BITS[1:]:
        path, _ = packed_file("mptify:resnet18_cifar", tmp_path, bits)
        program = mptify.load(path)
        weights = sum(layer.weight_count for layer in packed_layers(program))
        assert 8 * path.stat().st_size < 2.1 * weights + 8 * 60_000
        assert 8 * sum(layer.weight_bytes for layer in packed_layers(program)) < 2.1 * weights


def test_a_file_of_another_machine_is_laid_out_again(tmp_path, monkeypatch):
    """What the exporting machine had decided by its words and its speed is not in the file."""
    monkeypatch.setattr("mptify.runtime.lane_cost.word_bytes", lambda: 16)
    monkeypatch.setattr("mptify.runtime.lane_cost.compiles", lambda: False)
    path, x = packed_file("mptify:resnet18_cifar", tmp_path, "1/8")
    left = mptify.ticket_layers(mptify.load(path))
    with torch.no_grad():
        expected = mptify.load(tmp_path / "a.ticket")(x)
        monkeypatch.undo()
        program = mptify.load(path)
        assert mptify.ticket_layers(program).keys() == left.keys()
        assert torch.equal(program(x), expected)


def test_other_sizes_work_too(tmp_path):
    path, _ = packed_file("torchvision:resnet18", tmp_path)
    x = torch.randint(-24, 25, (1, 3, 96, 70)) / 8
    with torch.no_grad():
        # The classifier is torch's, and rounds as its weights' place in memory would have it.
        torch.testing.assert_close(
            mptify.load(path)(x), mptify.load(tmp_path / "a.ticket")(x), rtol=1e-6, atol=1e-6
        )


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("bits", ["1/1", "1/4", "1/32"])
def test_the_file_is_mapped_and_no_weight_is_decoded(bits, tmp_path):
    path, _ = packed_file("mptify:conv2", tmp_path, bits)
    script = (
        "import sys, mptify; from mptify.ticket import masks; masks.decode = None;"
        "from mptify.runtime.kernels.lanes_conv import LanesConv; LanesConv.ternary = None;"
        "program = mptify.load(sys.argv[1]); print(any(sys.argv[1] in line for line in open('/proc/self/maps')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True
    )
    assert result.stdout == "True\n", result.stderr


def test_any_flipped_bit_is_noticed(conv2, tmp_path):
    data = conv2[0].read_bytes()
    random.seed(0)
    for _ in range(60):
        changed = bytearray(data)
        changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
        (tmp_path / "a.packed").write_bytes(changed)
        with pytest.raises(MptifyError):
            packed_files.build_program(packed_files.open_packed(tmp_path / "a.packed"))
    for length in (0, 7, 8, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "a.packed").write_bytes(data[:length])
        with pytest.raises(MptifyError):
            packed_files.open_packed(tmp_path / "a.packed")


def cut(name):
    return lambda description, tensors: tensors.update({name: tensors[name][:-1].clone()})


def rows_that_are_no_taps(description, tensors):
    """Made for images of another height, on which the offsets are allowed."""
    description["kernels"]["features_2"]["geometry"][1] = [337, 32]
    tensors["kernel.features_2.index"].fill_(65087)


HOSTILE = {
    "rows outside": (rows_that_are_no_taps, "lie outside of the image"),
    "a kernel of another kind": (lambda d, t: d["kernels"].update(features_2=d["kernels"]["features_2_pool"]), "can't replace this layer"),
    "a type of another": (set_in("dtype", "load"), "a type or notes"),
    "notes that are none": (set_in("notes", 5), "a type or notes"),
    "a huge shape": (lambda d, t: d["shapes"].update({name: [2**70] for name in d["shapes"]}), "does not fit"),
    "survivors without a length": (lambda d, t: t.update({"kernel.features_2.index": torch.tensor(3, dtype=torch.uint16)}), "16-bit"),
    "survivors outside": (fill("kernel.features_2.index", 65535), "lie outside of the image"),
    "lists that go back": (fill("kernel.features_2.starts", 3), "do not follow each other"),
    "too few thresholds": (lambda d, t: t.update({"kernel.features_2.thresholds": torch.zeros(1, 3, dtype=torch.int32)}), "thresholds"),
    "survivors that are not there": (cut("kernel.features_2.index"), "do not follow each other"),
    "taps outside": (fill("kernel.features_0.taps", 99), "lie outside of the image"),
    "too few weights": (cut("kernel.classifier_1.weights"), "how many weights each filter keeps"),
    "a huge kernel": (set_in("kernels", "features_2", "geometry", 2, [1 << 20, 1]), "is not a size"),
    "a kernel of no size": (set_in("kernels", "features_2", "geometry", 2, [0, 3]), "not the geometry of a convolution"),
    "more channels": (set_in("kernels", "features_2", "geometry", 0, 128), None),
    "fewer survivors than there are": (set_in("kernels", "features_2", "max_kept", 1), "more survivors than it says"),
    "an unknown kernel": (set_in("kernels", "features_2", "kernel", "Chain"), "There is no runtime kernel 'Chain'; there are .*--plugin"),
    "no kernel": (set_in("kernels", "features_2", 5), "does not name a kernel"),
    "a kernel without a place": (lambda d, t: d["kernels"].update(other=d["kernels"]["features_2_pool"]), "no layer for other"),
    "a state without a place": (lambda d, t: t.update({"state.norm.weight": torch.ones(3)}), "norm.weight"),
    "sums without a gain": (lambda d, t: t.pop("kernel.classifier_5_sums.gain"), "can't replace this layer"),
    "signs with a gain": (lambda d, t: t.update({"kernel.features_2.gain": torch.ones(1)}), "can't replace this layer"),
    "two gains": (lambda d, t: t.update({"kernel.classifier_5_sums.gain": torch.ones(2)}), "its gain is not one float32 number"),
    "too few biases": (lambda d, t: t.update({"kernel.classifier_5_sums.bias": torch.ones(3)}), "not one float32 number per filter"),
    "another network": (set_in("architecture", "name", "conv4"), "does not fit mptify:conv4"),
    "a huge network": (set_in("architecture", {"source": "timm", "name": "vit_giant_patch14_224", "arguments": {}}), "not made from"),
    "a later version": (set_in("version", 9), "reads version 5"),
    "pairs of one": (fill_one("kernel.features_2.starts", 1, 1), "in pairs of one"),
    "no most sign": (fill("kernel.features_2.flipped", 7), "which filters are flipped"),
    "a layout of nothing": (set_in("kernels", "features_2", "layout", [32, 0, 1]), "is not a tile layout"),
    "another layout": (set_in("kernels", "features_2", "layout", [32, 7, 3]), "lie outside of the image"),
    "more than it should": (set_in("more", 1), "lacks or adds more"),
    "settings that mean nothing": (set_in("config", "prune", 7), "settings are invalid"),
}  # fmt: skip


@pytest.mark.parametrize("version", [3, 4])
def test_a_file_of_an_earlier_version_says_how_to_make_it_again(version, conv2, tmp_path):
    path = rewritten(conv2[0], tmp_path / "a.packed", set_in("version", version))
    with pytest.raises(DamagedTicket) as caught:
        mptify.load(path)
    assert str(caught.value) == (
        f"{path}: This packed file has format version {version}, but this mptify reads version 5; "
        "make it again: `mptify export TICKET --to packed`."
    )


def test_a_head_that_reads_what_is_not_there_is_refused(tmp_path):
    path, _ = packed_file("torchvision:mobilenet_v2", tmp_path)
    for change in (
        fill("kernel.classifier_1_sums.index", 2000),
        set_in("kernels", "classifier_1_sums", "inputs", 7),
    ):
        with pytest.raises(DamagedTicket, match="lie outside of the image"):
            mptify.load(rewritten(path, tmp_path / "b.packed", change))


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_writer_would_write_is_refused(what, conv2, tmp_path):
    change, message = HOSTILE[what]
    path = rewritten(conv2[0], tmp_path / "a.packed", change)
    with (
        pytest.raises((DamagedTicket, TicketMismatch, MptifyError), match=message),
        torch.no_grad(),
    ):
        mptify.load(path)(conv2[1])


def test_a_file_that_is_cut_short_is_told_in_words_of_ours(conv2, tmp_path):
    data = conv2[0].read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for rest in (
        data[:header],
        data[: header + 1],
        data[: len(data) // 2],
        data[:-1],
        data + b"\0",
    ):
        (tmp_path / "b.packed").write_bytes(rest)
        with pytest.raises(DamagedTicket) as caught:
            mptify.load(tmp_path / "b.packed")
        told = f"{tmp_path / 'b.packed'}: This packed file is cut short or damaged; export the ticket again."
        assert str(caught.value) == told


def test_wrong_uses_are_told(conv2, tmp_path):
    path, _ = conv2
    with pytest.raises(
        MptifyError, match="is a packed file: it takes no model, and runs on CPUs only"
    ):
        mptify.load(path, model=torch.nn.Linear(2, 2))
    with pytest.raises(DamagedTicket, match="This is a packed file, not a ticket"):
        mptify.read(path)
    with pytest.raises(DamagedTicket, match="This is not a packed file"):
        packed_files.open_packed(path.with_name("a.ticket"))
    with pytest.raises(MptifyError, match="can't be read"):
        packed_files.open_packed(tmp_path / "none")


def test_without_a_compiler_it_is_told(conv2, monkeypatch):
    monkeypatch.setattr(packed_files, "library", None)
    with pytest.raises(MptifyError, match="installed without a compiler"):
        mptify.load(conv2[0])


def test_pictures_are_predicted_from_it(conv2, tmp_path):
    from PIL import Image

    Image.new("RGB", (32, 32), (200, 30, 90)).save(tmp_path / "a.png")
    found = [
        CliRunner().invoke(
            app, ["predict", str(conv2[0].with_name(name)), str(tmp_path / "a.png"), "--json"]
        )
        for name in ("a.ticket", "a.packed")
    ]
    assert [one.exit_code for one in found] == [0, 0], found[1].output
    one, other = (json.loads(result.stdout) for result in found)
    assert (one["labels"], one["chances"]) == (other["labels"], other["chances"])
