"""Charts have round ticks and few points; pictures of masks show every weight, or blocks."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

import mptify
from mptify.report.charts import Line, _ticks, line_chart
from mptify.report.mask_images import kernels_picture, mask_picture


@pytest.fixture(scope="module")
def ticket():
    """Its first layer sees images, and its last has more weights than a picture has cells."""
    network = mptify.models.conv2(width=0.25, in_chans=1, input_size=8)
    return mptify.ticket_of(mptify.transform(network, prune=0.7))


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (0, 0), (0.3, 0.3), (-2, 5e-9), (0, 25_502_912), (0.9791, 0.9805), (0, 1e-12)],
)
def test_ticks_are_few_and_reach_around_the_values(low, high):
    ticks = _ticks(low, high)
    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= low + 1e-15
    assert ticks[-1] >= high - 1e-15


def test_a_curve_without_numbers_is_no_chart_and_a_long_one_is_thinned_out():
    assert line_chart("loss", [Line("loss", [(1.0, float("nan"))], "ticket")]) is None
    chart = line_chart(
        "loss", [Line("loss", [(float(n), n % 7.0) for n in range(100_000)], "ticket")]
    )
    assert max(shape.attributes.get("d", "").count("L") for shape in chart.shapes) <= 400


def test_pictures_show_each_weight_or_the_means_of_blocks(ticket):
    first, *_, wide = ticket.layers.values()
    for layer in (first, wide):
        picture = mask_picture(layer, 5)
        drawn = np.asarray(
            Image.open(io.BytesIO(base64.b64decode(picture.address.partition(",")[2])))
        )
        plane = layer.mask.reshape(layer.shape[0], -1)
        down, right = picture.block
        assert drawn.shape == (-(-plane.shape[0] // down), -(-plane.shape[1] // right))
        assert drawn[0, 0] == np.ceil(plane[:down, :right].mean() / picture.darkest * 15 - 1e-6)
        assert picture.width % drawn.shape[1] == picture.height % drawn.shape[0] == 0
    kernels = kernels_picture(first, ticket.config)
    colours = Image.open(io.BytesIO(base64.b64decode(kernels.address.partition(",")[2])))
    counts = np.bincount(np.asarray(colours).reshape(-1), minlength=34)
    assert kernels.shown == first.shape[0]
    negative = first.negative(ticket.config.seed)[first.mask].sum()
    assert (counts[:16].sum(), counts[16:32].sum(), counts[33]) == (
        first.kept - negative,
        negative,
        first.size - first.kept,
    )
    assert kernels_picture(wide, ticket.config) is None
