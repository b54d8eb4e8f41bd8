"""Gains and effective weights of given masks, put together from the parts of `mptify.nn.topk`."""

from mptify.nn import topk


def gain_of(weight, mask):
    """The mean magnitude of the survivors."""
    return topk.weigh(weight, topk.survivors(weight, mask), int(mask.sum()), 1, True).gain


def weight_of(
    scores, weight, mask, gain, *, weight_bits=1, score_grad="biprop", includes_gain=True
):
    """The effective weight, whose gradient goes to the scores."""
    effective = topk.survivors(weight, mask)
    if weight_bits == 32:
        effective, gain, includes_gain = effective * weight.detach().abs(), gain, True
    elif includes_gain:
        effective = effective * gain.detach()
    return topk.straight_through_weight(scores, weight, effective, gain, score_grad, includes_gain)
