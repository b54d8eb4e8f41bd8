"""The paper's theorem (appendix B) as a program: its bounds, its construction and a check.

    finding = theory.check([first, second], epsilon=0.1, delta=0.01)  # matrices or nn.Sequential
    finding.worst_error, finding.nonzeros, finding.failed, finding.holds

A subnetwork of a random binary network approximates any fully connected ReLU network F with bounded
weights, if the random network is twice as deep and wide enough. `docs/theory.md` explains what the
proof builds, what was measured and where the printed text is wrong.
"""

from mptify.tools.theory.bounds import Bound, lemma1, lemma2, lemma3, theorem
from mptify.tools.theory.checking import (
    FRACTIONS,
    Finding,
    ball_points,
    certified_error,
    check,
    failure_probability,
    least_width,
)
from mptify.tools.theory.construction import (
    Masks,
    RandomNetwork,
    Subnetwork,
    construct,
    find_masks,
    layer_bounds,
)
from mptify.tools.theory.targets import Target, as_target, extreme_target, random_target, scaled

__all__ = [
    "FRACTIONS",
    "Bound",
    "Finding",
    "Masks",
    "RandomNetwork",
    "Subnetwork",
    "Target",
    "as_target",
    "ball_points",
    "certified_error",
    "check",
    "construct",
    "extreme_target",
    "failure_probability",
    "find_masks",
    "layer_bounds",
    "least_width",
    "lemma1",
    "lemma2",
    "lemma3",
    "random_target",
    "scaled",
    "theorem",
]
