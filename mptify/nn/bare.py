"""Ticket layers that were loaded from a file: for inference, with nothing but the weights that they compute with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mptify.nn import functional

__all__ = ["Bare"]


class Bare:
    r"""What a ticket layer can do without scores.

    Its `frozen` is the effective weight then, $M \odot B$ or $\alpha M \odot B$ or $M \odot W$, held once, and `bare_gain` the gain.
    """

    scores: Any
    frozen: Any
    bare_gain: Any  # a buffer
    threshold: Any
    kept: Any
    weight_bits: int
    gain_outside: Any
    _parameters: dict[str, Any]
    _buffers: dict[str, Any]
    _mask: Any
    _forget: Any
    _fetch: Callable[[], Tensor] | None = None  # where the weight is elsewhere still

    @property
    def is_bare(self) -> bool:
        """Whether nothing but the effective weight is there."""
        return self.scores is None

    def bare_weight(self, mask: Tensor, frozen: Tensor) -> Tensor:
        """What a bare layer holds: the effective weight, without the gain where that comes behind."""
        return (functional.sign(frozen) if self.gain_outside else frozen) * mask

    def bare_(self, other: Any = None) -> None:
        """Throw away scores and frozen weights, to hold one ticket's effective weight (see `hold_`) and nothing else.

        `other` is a bare layer whose weight this one shares.
        """
        self.threshold = None
        self._forget()
        device = torch.device("cpu") if self.frozen.is_meta else self.frozen.device
        weight = torch.empty(self.frozen.shape, dtype=torch.float32, device=device) if other is None else other.frozen
        self._parameters["frozen"] = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        self._parameters["scores"] = None
        self._buffers["bare_gain"] = torch.ones((), dtype=torch.float32, device=device) if other is None else other.bare_gain

    def fetch_(self, fetch: Callable[[], Tensor], gain: float, kept: int) -> None:
        """Be bare, without even the effective weight: `fetch` is asked for it whenever it is needed, until `hold_` is called."""
        self.bare_()
        self._parameters["frozen"] = nn.Parameter(torch.empty(self.frozen.shape, device="meta"), requires_grad=False)
        self.bare_gain.fill_(gain if self.weight_bits == 1 else 1.0)
        self.kept, self._fetch = kept, fetch

    def _fetched(self) -> Tensor:
        return self.frozen if self._fetch is None else self._fetch()

    def _hold_bare_(self, weight: Tensor, mask: Tensor, gain: float) -> None:
        if self._fetch is not None:
            self._fetch, self._parameters["frozen"] = None, nn.Parameter(torch.empty_like(weight), requires_grad=False)
        self.frozen.copy_(weight)
        self.bare_gain.fill_(gain)
        self._mask = None if torch.equal(weight != 0, mask) else mask.to(self.frozen.device)  # a survivor may be 0 itself
