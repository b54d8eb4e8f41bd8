"""Pictures of every kind are read as a person sees them: in folders, in timm's data sets and by `predict`."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import mptify
from mptify.cli import app
from mptify.config import DataConfig
from mptify.errors import BadData
from mptify.models import conv2
from mptify.training.data import evaluation_batches
from mptify.training.images import plain, read_image
from mptify.training.sources import load_data

TIMM_LEAVES_FILES_OPEN = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
SIZE = (24, 16)  # wide, so that a turn shows


def ramp():
    """Grey levels of 16 bits, from black at the left to white at the right."""
    return np.tile(np.linspace(0, 65535, SIZE[0]).astype(np.uint16), (SIZE[1], 1))


def grey16(path):
    Image.fromarray(ramp()).save(path)


def grey32(path):
    Image.fromarray(ramp().astype(np.int32)).save(path)


def floats(path):
    Image.fromarray((ramp() / 65535).astype(np.float32)).save(path)


def cmyk(path):
    Image.merge("CMYK", [Image.new("L", SIZE, ink) for ink in (0, 255, 255, 0)]).save(path)  # red


def halves(mode="RGBA"):
    """Red at the left; at the right green that is transparent."""
    image = Image.new("RGBA", SIZE, (255, 0, 0, 255))
    image.paste((0, 255, 0, 0), (SIZE[0] // 2, 0, *SIZE))
    return image


def rgba(path):
    halves().save(path)


def palette(path):
    image = Image.new("P", SIZE, 0)
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.paste(1, (SIZE[0] // 2, 0, *SIZE))
    image.save(path, transparency=1)


def grey_alpha(path):
    image = Image.new("LA", SIZE, (40, 255))
    image.paste((40, 0), (SIZE[0] // 2, 0, *SIZE))
    image.save(path)


def turned(path):
    """Black at the top and white below, stored on its side."""
    upright = Image.new("RGB", (SIZE[1], SIZE[0]), (0, 0, 0))
    upright.paste((255, 255, 255), (0, SIZE[0] // 2, SIZE[1], SIZE[0]))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)


RED, WHITE, DARK = [255, 0, 0], [255, 255, 255], [40, 40, 40]
LEFT, MIDDLE, RIGHT = (8, 1), (8, 12), (8, 22)
KINDS = [
    (grey16, "a.png", {LEFT: [11] * 3, MIDDLE: [133] * 3, RIGHT: [244] * 3}),
    (grey16, "a.tif", {LEFT: [11] * 3, MIDDLE: [133] * 3, RIGHT: [244] * 3}),
    (grey32, "a.tif", {LEFT: [11] * 3, MIDDLE: [133] * 3, RIGHT: [244] * 3}),
    (floats, "a.tif", {LEFT: [11] * 3, MIDDLE: [133] * 3, RIGHT: [244] * 3}),
    (cmyk, "a.jpg", {LEFT: [254, 0, 0], RIGHT: [254, 0, 0]}),
    (cmyk, "a.tif", {LEFT: RED, RIGHT: RED}),
    (rgba, "a.png", {LEFT: RED, RIGHT: WHITE}),
    (rgba, "a.webp", {LEFT: RED, RIGHT: WHITE}),
    (palette, "a.png", {LEFT: RED, RIGHT: WHITE}),
    (palette, "a.gif", {LEFT: RED, RIGHT: WHITE}),
    (grey_alpha, "a.png", {LEFT: DARK, RIGHT: WHITE}),
    (turned, "a.jpg", {(2, 8): [0] * 3, (20, 8): WHITE}),
]
ids = [f"{make.__name__}-{name.partition('.')[2]}" for make, name, _ in KINDS]


@pytest.mark.parametrize(("make", "name", "expected"), KINDS, ids=ids)
def test_a_picture_is_read_as_a_person_sees_it(make, name, expected, tmp_path):
    make(tmp_path / name)
    pixels = np.asarray(read_image(tmp_path / name)).astype(int)
    grey = np.asarray(read_image(tmp_path / name, "L")).astype(int)
    assert pixels.ndim == 3
    assert grey.ndim == 2
    assert grey.shape == pixels.shape[:2] == (SIZE if make is turned else SIZE[::-1])
    for (row, column), colour in expected.items():
        assert np.abs(pixels[row, column] - colour).max() <= (
            8 if name.endswith(("jpg", "webp")) else 1
        )
        luma = np.dot(colour, [0.299, 0.587, 0.114])
        assert abs(grey[row, column] - luma) <= (8 if name.endswith(("jpg", "webp")) else 1)


def test_a_plain_picture_stays_as_it_is():
    image = Image.effect_noise((20, 10), 60).convert("RGB")
    assert plain(image) is not None
    assert np.array_equal(np.asarray(plain(image)), np.asarray(image))
    assert np.array_equal(np.asarray(plain(plain(halves()))), np.asarray(plain(halves())))


def test_a_transparent_level_of_sixteen_bits_shows_white(tmp_path):
    image = Image.fromarray(np.full((8, 8), 1000, np.uint16))
    image.save(tmp_path / "a.png", transparency=1000)
    assert np.asarray(read_image(tmp_path / "a.png")).min() == 255


def test_levels_of_which_nobody_knows_the_white_are_refused(tmp_path):
    for name, values in (
        ("a.tif", np.full((8, 8), 70_000, np.int32)),
        ("b.tif", np.full((8, 8), np.nan, np.float32)),
    ):
        Image.fromarray(values).save(tmp_path / name)
        with pytest.raises(ValueError, match="none is known to be white"):
            read_image(tmp_path / name)


# -- where pictures are read -----------------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path):
    """Ramps of 16 bits of class 0, pictures that are half transparent of class 1, turned ones of class 2."""
    for part in ("train", "val"):
        for label, (make, name) in enumerate(
            ((grey16, "a.png"), (rgba, "a.png"), (turned, "a.jpg"))
        ):
            for number in range(2):
                path = tmp_path / "photos" / part / str(label) / f"{number}{name}"
                path.parent.mkdir(parents=True, exist_ok=True)
                make(path)
    return tmp_path / "photos"


@pytest.mark.parametrize("source", ["imagefolder", "timm:folder"])
@TIMM_LEAVES_FILES_OPEN
def test_a_data_set_reads_them_so(photos, source):
    _, val = load_data(DataConfig(source=f"{source}:{photos}", size=16, workers=0))
    val.mean, val.std = (0.0,) * 3, (1 / 255,) * 3
    pixels, labels = next(evaluation_batches(val, 6, rank=0, world=1, device="cpu"))
    for image, label in zip(pixels, labels.tolist(), strict=True):
        if label == 0:
            assert (
                image.amax((0, 1)).diff() > 0
            ).all()  # a ramp still, and not white from its first step on
        elif label == 1:
            assert image[:, 8, 14].min() > 254  # white, and not the green below
            assert image[0, 8, 1] > 254
            assert image[1:, 8, 1].max() < 1
        else:
            assert image[:, 1].max() < 20  # dark above
            assert image[:, -2].min() > 235


@TIMM_LEAVES_FILES_OPEN
def test_timm_passes_over_no_broken_image(photos):
    (photos / "val/1/1a.png").write_bytes(b"no picture")
    with pytest.raises(BadData, match=r"1 of 12 images can't be read: .*1a\.png \(no image\)"):
        load_data(DataConfig(source=f"timm:folder:{photos}", size=16, workers=0))


@TIMM_LEAVES_FILES_OPEN
def test_an_image_that_timm_finds_broken_later_is_named(photos):
    _, val = load_data(DataConfig(source=f"timm:folder:{photos}", size=16, workers=0))
    (photos / "val/1/1a.png").write_bytes(b"no picture")
    with pytest.raises(BadData, match=r"1a\.png: can't be read"):
        list(evaluation_batches(val, 6, rank=0, world=1, device="cpu"))


@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
@pytest.mark.parametrize(
    ("make", "name"), [(grey16, "a.png"), (rgba, "a.png"), (turned, "a.jpg"), (cmyk, "a.jpg")]
)
@pytest.mark.parametrize("channels", [1, 3])
def test_predict_reads_them_so(make, name, channels, tmp_path):
    notes = {
        "input": {"shape": [channels, 16, 16], "mean": [0.5] * channels, "std": [0.25] * channels}
    }
    ticketed = mptify.transform(conv2(num_classes=4, in_chans=channels, input_size=16)).eval()
    arguments = {"num_classes": 4, "in_chans": channels, "input_size": 16}
    mptify.save(ticketed, tmp_path / "a.ticket", "mptify:conv2", arguments=arguments, notes=notes)
    make(tmp_path / name)
    read_image(tmp_path / name).save(tmp_path / "plain.png")
    found = CliRunner().invoke(
        app,
        [
            "predict",
            str(tmp_path / "a.ticket"),
            str(tmp_path / name),
            str(tmp_path / "plain.png"),
            "--json",
        ],
    )
    assert found.exit_code == 0, found.exception
    first, second = (json.loads(line) for line in found.stdout.splitlines())
    assert first["labels"] == second["labels"]
    assert torch.tensor(first["chances"]).sub(torch.tensor(second["chances"])).abs().max() < 0.02
