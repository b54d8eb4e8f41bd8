"""Thresholds: where the float path's own modules change their answer."""

import pytest
import torch
from torch import nn

from mptify.runtime.library import library
from mptify.runtime.thresholds import find_joint_thresholds, find_real_thresholds, find_thresholds
from tests.helpers.packed import shaken_

pytestmark = [
    pytest.mark.skipif(library is None, reason="this machine has no C++ compiler"),
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
]


def test_thresholds_are_where_the_answers_change():
    least = torch.tensor([-7.0, 0.0, 3.0, 99.0, -99.0])
    turned = torch.tensor([False, True, False, False, True])

    def epilogue(sums, shortcut):
        reached = sums + 2 * shortcut >= least.view(1, -1, 1, 1)
        return torch.where(reached != turned.view(1, -1, 1, 1), 1.0, -1.0)

    found = find_thresholds(epilogue, 5, 20, shortcut=True)
    assert found.falling.tolist() == [False, True, False, False, False]
    assert found.least.tolist() == [[-5, -1, 5, 21, 21], [-9, 3, 1, 21, 21]]
    assert (
        find_thresholds(
            lambda sums, _: torch.where(sums.abs() > 3, 1.0, -1.0), 5, 20, shortcut=False
        )
        is None
    )


def test_real_thresholds_are_the_very_numbers():
    norm = nn.BatchNorm2d(200).eval()
    shaken_(norm)

    def epilogue(sums, _):
        return torch.where(norm(sums * 0.37) >= 0, 1.0, -1.0)

    with torch.no_grad():
        found = find_real_thresholds(epilogue, 200)
        least = found.least.view(1, -1, 1, 1)
        finite = least.isfinite().view(-1)
        assert (epilogue(least, 0).view(-1) > 0)[finite].all()
        beyond = torch.where(found.falling.view(1, -1, 1, 1), torch.inf, -torch.inf)
        assert (epilogue(torch.nextafter(least, beyond), 0).view(-1) < 0)[finite].all()
        assert finite.sum() > 100
        for x in (-1e30, 0.0, 1e30):
            always = (epilogue(torch.full((1, 200, 1, 1), x), 0) > 0).view(-1)
            assert torch.equal(always[~finite], found.least[~finite] < 0)


def test_thresholds_of_two_layers_are_where_the_answers_change():
    norms = [shaken_(nn.BatchNorm2d(60)).eval() for _ in range(2)]
    most, most_other = 17, 5

    def epilogue(sums, others):
        return torch.where(norms[0](sums * 0.3) + norms[1](others * 0.7) >= 0, 1.0, -1.0)

    with torch.no_grad():
        found = find_joint_thresholds(epilogue, 60, most, most_other)
        for place, other in enumerate(range(-most_other, most_other + 1)):
            for sum_ in range(-most, most + 1):
                grid = torch.full((1, 60, 1, 1), float(sum_))
                expected = epilogue(grid, torch.full((1, 60, 1, 1), float(other))).view(-1) > 0
                turned = torch.where(found.falling, -sum_, sum_)
                assert torch.equal(turned >= found.least[:, place], expected)
    assert found.falling.any()
    assert not found.falling.all()
