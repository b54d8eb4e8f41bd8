"""Packed networks of every family in every width against the float path.

`pytest -m long` tries each family in one width, and `pytest -m sweep` in all of them.
"""

import pytest
import torch
from torch.utils._pytree import tree_map

import mptify
from mptify.runtime.kernels.lanes_conv import LanesConv
from mptify.runtime.kernels.masked_linear import MaskedLinear
from mptify.runtime.library import library
from tests.helpers.outputs import exact, flat
from tests.helpers.packed import THREE_DIMENSIONS
from tests.representatives import ENTRIES, build

pytestmark = [
    pytest.mark.skipif(library is None, reason="this machine has no C++ compiler"),
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
]
WIDTHS = ("1/2", "1/4", "1/8", "1/32")
QUICK = {"convnext_tiny", "ghostnet_050", "mobilenet_v2", "shufflenet_v2_x0_5"}


def marks_of(number, entry, width):
    if entry.name in QUICK:
        return []
    return [pytest.mark.long if number % len(WIDTHS) == width else pytest.mark.sweep]


@pytest.mark.parametrize(
    ("entry", "bits"),
    [
        pytest.param(entry, bits, id=f"{entry}-{bits}", marks=marks_of(number, entry, width))
        for number, entry in enumerate(ENTRIES)
        for width, bits in enumerate(WIDTHS)
    ],
)
def test_packed_networks_of_every_width_are_the_float_path(entry, bits):
    """On inputs whose sums are exact. Layer norms and attention, which torch computes, differ in
    the last bits with the order of numbers in memory."""
    model, inputs = build(entry)
    ticketed = mptify.transform(model, bits=bits, prune=0.8)
    with torch.no_grad():
        x = tuple(tree_map(lambda one: exact(one) if torch.is_floating_point(one) else one, inputs))
        ticketed.train()(*x)
        ticketed.eval()
        x = x[:1] if isinstance(x[0], list) else x  # a detector's targets are for training
        program = mptify.pack(ticketed, x)
        for ours, theirs in zip(flat(program(*x)), flat(ticketed(*x)), strict=True):
            assert ours.shape == theirs.shape
            limit = (1e-5 if bits == "1/32" else 1e-6) * theirs.double().norm()
            assert (ours.double() - theirs.double()).norm() <= limit
    packed = [part for part in program.modules() if isinstance(part, (LanesConv, MaskedLinear))]
    assert packed or entry.name in THREE_DIMENSIONS
