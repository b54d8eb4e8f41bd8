"""Concatenation of channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mptify.errors import MptifyError
from mptify.registry import kernels
from mptify.runtime.kernel import NativeKernel
from mptify.runtime.values import Bits, Value

__all__ = ["Concat"]


@kernels.register("concat")
class Concat(NativeKernel):
    """Concatenates the channels of several images, one step for each."""

    def emit(self, builder: Any, *inputs: Value) -> Value:
        forms = [form for form, _ in inputs if isinstance(form, Bits)]
        first, channels = forms[0], sum(form.channels for form in forms)
        if any(form != replace(first, channels=form.channels) for form in forms):
            sizes = ", ".join(f"{form.height}×{form.width}" for form in forms)
            raise MptifyError(f"Images of different sizes can't be concatenated: {sizes}.")
        result: Value | None = None
        offset = 0
        for form, (_, buffer) in zip(forms, inputs, strict=True):
            length = form.channels * form.stride
            fields = {"input": buffer, "span": offset, "length": length}
            result = builder.add("concat", replace(first, channels=channels), result, **fields)
            offset += length
        assert result is not None
        return result
