"""Frozen randomness: signs, magnitudes and initial scores that are the same on every machine.

A Philox counter generator is keyed by the SHA-256 of seed, layer name and purpose. Only its raw
64-bit words are used, since NumPy guarantees their stability, but not that of its distributions.
They become numbers by integer arithmetic, table look-ups and single IEEE operations
(`+ - * / sqrt`), which every platform rounds alike.

| purpose | from each 64-bit word, lowest bits first | value |
| --- | --- | --- |
| `signs` | 64 signs | bit 1 is -1, bit 0 is +1 |
| `magnitudes` | 4 indices of 16 bits | the half-normal quantile at (index + ½) / 65536 (float32) |
| `scores` | 2 numbers of 32 bits, of which 24 are used | uniform on (-bound, bound), not 0 |
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from mptify.errors import BadConfig
from mptify.registry import init_schemes

__all__ = [
    "KAIMING_GAIN", "LEVEL_BLOCK", "Draw", "frozen_weight", "kaiming_normal", "magnitudes",
    "score_levels", "scores", "signed_constant", "signs", "standard_deviation", "undrawn",
]  # fmt: skip

KAIMING_GAIN = math.sqrt(2)  # for ReLU-like nonlinearities, as in the paper
LEVEL_BLOCK = 1 << 17  # even, so that a block consists of whole words
_LN2 = 0.6931471805599453


_drawing: ContextVar[bool] = ContextVar("drawing", default=True)


@contextmanager
def undrawn() -> Iterator[None]:
    """Leave weights and scores uninitialized inside this context, to read them from a file."""
    token = _drawing.set(False)
    try:
        yield
    finally:
        _drawing.reset(token)


def _words(seed: int, layer: str, purpose: str, count: int) -> np.ndarray:
    """The first `count` words of the stream of this seed, layer and purpose, little-endian."""
    return _generator(seed, layer, purpose).random_raw(count).astype("<u8", copy=False)


def _generator(seed: int, layer: str, purpose: str) -> np.random.Philox:
    label = f"mptify 1\n{seed}\n{layer}\n{purpose}".encode()
    return np.random.Philox(key=int.from_bytes(hashlib.sha256(label).digest()[:16], "little"))


def signs(seed: int, layer: str, count: int) -> np.ndarray:
    """`count` booleans, True where the frozen weight is negative."""
    words = _words(seed, layer, "signs", -(-count // 64))
    return np.unpackbits(words.view(np.uint8), count=count, bitorder="little").view(bool)


def magnitudes(seed: int, layer: str, count: int) -> np.ndarray:
    """`count` half-normal magnitudes of unit standard deviation (float32)."""
    words = _words(seed, layer, "magnitudes", -(-count // 4))
    return _half_normal_table()[words.view("<u2")[:count]]


def scores(seed: int, layer: str, count: int, bound: float) -> np.ndarray:
    """`count` scores, uniform between -bound and bound and never 0 (float32)."""
    if not _drawing.get():
        return np.empty(count, np.float32)
    words = _words(seed, layer, "scores", -(-count // 2))
    steps = (words.view("<u4")[:count] >> 8).astype(np.float32)
    steps += np.float32(0.5 - 2**23)
    steps *= np.float32(bound * 2.0**-23)
    return steps


def score_levels(seed: int, layer: str, count: int) -> Iterator[np.ndarray]:
    """The magnitude of the initial scores, from 0 to 127 (uint8), in blocks of `LEVEL_BLOCK`."""
    generator = _generator(seed, layer, "scores")
    for start in range(0, count, LEVEL_BLOCK):
        words = generator.random_raw(LEVEL_BLOCK // 2).astype("<u8", copy=False)
        top = words.view(np.uint8)[3::4][: count - start]
        # Negative ones count down from 127.
        yield (top ^ ((top >> 7) - np.uint8(1))) & np.uint8(127)


def standard_deviation(fan_in: int, prune: float, gain: float = KAIMING_GAIN) -> float:
    """`gain / sqrt(fan_in * (1 - prune))`, so that pruning keeps the variance."""
    return gain / math.sqrt(max(fan_in * (1 - prune), 1.0))


@dataclass(frozen=True)
class Draw:
    """What an init scheme draws: the magnitudes of one layer.

    Attributes:
        seed: The seed of the ticket.
        layer: The layer's name.
        count: How many magnitudes to return.
        std: The standard deviation that the layer's fan-in asks for.
    """

    seed: int
    layer: str
    count: int
    std: float

    def words(self, count: int) -> np.ndarray:
        """The first `count` 64-bit words of the stream of this seed and layer, little-endian."""
        return _words(self.seed, self.layer, "magnitudes", count)


@init_schemes.register("kaiming_normal")
def kaiming_normal(draw: Draw) -> np.ndarray:
    """Half-normal magnitudes times the standard deviation: with signs, a normal distribution."""
    values = magnitudes(draw.seed, draw.layer, draw.count)
    values *= np.float32(draw.std)
    return values


@init_schemes.register("signed_constant")
def signed_constant(draw: Draw) -> np.ndarray:
    """Every magnitude is the standard deviation."""
    return np.full(draw.count, draw.std, np.float32)


def frozen_weight(
    seed: int, layer: str, shape: tuple[int, ...], scheme: str, std: float
) -> np.ndarray:
    """The frozen weights of one layer (float32): signs times magnitudes of the named scheme.

    Raises:
        BadConfig: There is no such scheme, or it returns anything but non-negative magnitudes.
    """
    if not _drawing.get():
        return np.empty(shape, np.float32)
    draw = Draw(seed, layer, math.prod(shape), std)
    values = np.ascontiguousarray(init_schemes[scheme](draw), np.float32)
    if values.shape != (draw.count,) or not (values >= 0).all():
        raise BadConfig(
            f"{layer}: the init scheme {scheme!r} must return {draw.count} non-negative magnitudes."
        )
    bits = values.view(np.uint32)
    negative = signs(seed, layer, draw.count).astype(np.uint32)
    bits ^= negative << np.uint32(31)  # the sign bit of a float32
    return values.reshape(shape)


@functools.cache
def _half_normal_table() -> np.ndarray:
    """The quantiles of |N(0, 1)| at (i + 1/2) / 65536: Wichura's AS 241 in IEEE operations."""
    upper = 0.5 - (np.arange(65536, dtype=np.float64) + 0.5) / 131072  # upper tail of N(0, 1)
    centre = 0.5 - upper
    near = 0.180625 - centre * centre
    table = centre * _ratio(near, _NEAR_TOP, _NEAR_BOTTOM)
    tail = centre > 0.425
    reach = np.sqrt(-_log(upper[tail]))
    table[tail] = np.where(
        reach <= 5,
        _ratio(reach - 1.6, _TAIL_TOP, _TAIL_BOTTOM),
        _ratio(reach - 5, _FAR_TOP, _FAR_BOTTOM),
    )
    table = table.astype(np.float32)
    table.setflags(write=False)
    return table


def _log(x: np.ndarray) -> np.ndarray:
    """ln(x) without libm, whose last bit differs between platforms, by the atanh series."""
    mantissa, exponent = np.frexp(x)
    z = (mantissa - 0.75) / (mantissa + 0.75)
    square = z * z
    series = np.zeros_like(z)
    for k in range(25, -1, -1):
        series = series * square + 1 / (2 * k + 1)
    return exponent * _LN2 + 2 * z * series + _LN_THREE_QUARTERS


_LN_THREE_QUARTERS = -0.2876820724517809


def _ratio(x: np.ndarray, top: tuple[float, ...], bottom: tuple[float, ...]) -> np.ndarray:
    return _polynomial(x, top) / _polynomial(x, bottom)


def _polynomial(x: np.ndarray, coefficients: tuple[float, ...]) -> np.ndarray:
    total = np.zeros_like(x)
    for coefficient in reversed(coefficients):
        total = total * x + coefficient
    return total


_NEAR_TOP = (
    3.3871328727963666080e0,
    1.3314166789178437745e2,
    1.9715909503065514427e3,
    1.3731693765509461125e4,
    4.5921953931549871457e4,
    6.7265770927008700853e4,
    3.3430575583588128105e4,
    2.5090809287301226727e3,
)
_NEAR_BOTTOM = (
    1.0,
    4.2313330701600911252e1,
    6.8718700749205790830e2,
    5.3941960214247511077e3,
    2.1213794301586595867e4,
    3.9307895800092710610e4,
    2.8729085735721942674e4,
    5.2264952788528545610e3,
)
_TAIL_TOP = (
    1.42343711074968357734e0,
    4.63033784615654529590e0,
    5.76949722146069140550e0,
    3.64784832476320460504e0,
    1.27045825245236838258e0,
    2.41780725177450611770e-1,
    2.27238449892691845833e-2,
    7.74545014278341407640e-4,
)
_TAIL_BOTTOM = (
    1.0,
    2.05319162663775882187e0,
    1.67638483018380384940e0,
    6.89767334985100004550e-1,
    1.48103976427480074590e-1,
    1.51986665636164571966e-2,
    5.47593808499534494600e-4,
    1.05075007164441684324e-9,
)
_FAR_TOP = (
    6.65790464350110377720e0,
    5.46378491116411436990e0,
    1.78482653991729133580e0,
    2.96560571828504891230e-1,
    2.65321895265761230930e-2,
    1.24266094738807843860e-3,
    2.71155556874348757815e-5,
    2.01033439929228813265e-7,
)
_FAR_BOTTOM = (
    1.0,
    5.99832206555887937690e-1,
    1.36929880922735805310e-1,
    1.48753612908506148525e-2,
    7.86869131145613259100e-4,
    1.84631831751005468180e-5,
    1.42151175831644588870e-7,
    2.04426310338993978564e-15,
)
