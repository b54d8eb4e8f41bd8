"""The paper's backbones."""

import math

import pytest
import torch

from mptify import models


@pytest.mark.parametrize(("make", "count"), [(models.conv2, 4_300_992), (models.conv4, 2_425_024), (models.conv6, 2_261_184)])
def test_a_backbone_has_the_weights_that_it_should(make, count):
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in make().parameters()) == count


def test_weights_start_as_the_paper_says():
    """Kaiming normal: a deviation of sqrt(2 / fan-in), for those that are trained densely."""
    torch.manual_seed(0)
    for weight in models.conv4().parameters():
        assert float(weight.detach().std()) == pytest.approx(math.sqrt(2 / weight[0].numel()), rel=0.06)
