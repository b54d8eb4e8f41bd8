"""Outputs of networks, and whether two of them agree."""

import copy
import itertools

import torch

from mptify.runtime.kernels.pooled_linear import PooledLinear


def flat(output):
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        yield from itertools.chain.from_iterable(flat(one) for one in output.values())
    elif isinstance(output, (list, tuple)):
        yield from itertools.chain.from_iterable(flat(one) for one in output)


def agree(ours, theirs, tolerance=1e-4):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def seeded(model, inputs):
    torch.manual_seed(11)
    return list(flat(model(*copy.deepcopy(inputs))))


def exact(x):
    """Numbers whose sums are the same in any order."""
    return (x * 8).round().clamp(-24, 24) / 8


def require_same(ours, theirs, program):
    """The logits are the float path's, to the last bit.

    A classifier that reads averages adds integers and divides once; torch divides first.
    """
    if any(isinstance(module, PooledLinear) for module in program.modules()):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)
    else:
        assert torch.equal(ours, theirs)
