"""8-bit inputs for finished 1/32 tickets: ranges from calibration images, and what rounding costs.

The result is a model of 1/8 layers with the same masks, signs and gains. Layers whose weight other
code multiplies by, as `nn.MultiheadAttention` does, keep 32-bit inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mptify.errors import BadConfig, MptifyError, first_line, shown
from mptify.models import registry
from mptify.nn.quantizers import RunningQuantizer
from mptify.surgery import layer_registry, ticket_layers
from mptify.surgery.trace import share_copy

__all__ = ["Batches", "Calibration", "check_activation_bits", "round_inputs", "round_inputs_"]

_BATCH = 64  # images, of a tensor of all images


@dataclass(frozen=True)
class Calibration:
    """What 8-bit inputs cost, on the images that they were calibrated on.

    Attributes:
        images: The number of images.
        difference: The largest difference of an output, over the largest output; None if outputs
            have other shapes, as a detector's boxes may.
        agreement: The share of images that get the same class; None if the network is not a
            classifier.
        float_top1: The top-1 accuracy with 32-bit inputs; None without labels.
        top1: The top-1 accuracy with 8-bit inputs; None without labels.
    """

    images: int
    difference: float | None
    agreement: float | None = None
    float_top1: float | None = None
    top1: float | None = None

    def __str__(self) -> str:
        found = []
        if self.top1 is not None and self.float_top1 is not None:
            found.append(
                f"top-1 {100 * self.top1:.2f} % with 8-bit inputs, {100 * self.float_top1:.2f} % "
                "with 32-bit inputs"
            )
        if self.agreement is not None:
            found.append(f"the same class for {100 * self.agreement:.2f} % of the images")
        if self.difference is not None:
            found.append(f"outputs differ by at most {self.difference:.1e} of the largest")
        return f"{self.images:,} calibration images: " + ("; ".join(found) or "not comparable")


# -- images ------------------------------------------------------------------------------------


class _Batch(NamedTuple):
    """The arguments of the model, and labels if there are any."""

    arguments: tuple[Any, ...]
    labels: Tensor | None = None


class Batches:
    """Calibration images, batch by batch, as often as they are wanted.

    Args:
        calibrate: A tensor of images, or an iterable of batches. A batch is a tensor, or a tuple or
            list whose first element is the images, or a tuple of all arguments of the model. An
            iterator, which runs only once, is kept in memory.

    Raises:
        MptifyError: There are no images.
    """

    def __init__(self, calibrate: Any):
        if isinstance(calibrate, Tensor) and calibrate.dim() > 0:
            calibrate = calibrate.split(_BATCH)
        is_odd = isinstance(calibrate, (str, bytes, Mapping, Tensor))
        if is_odd or not isinstance(calibrate, Iterable):
            raise MptifyError(
                "activation_bits=8 needs calibrate=images: a tensor of images or an iterable of "
                f"batches, not {shown(calibrate)}."
            )
        is_iterator = iter(calibrate) is calibrate
        self._source: Iterable[Any] = list(calibrate) if is_iterator else calibrate
        first = next(iter(self), None)
        if first is None:
            raise MptifyError("calibrate has no images; a few hundred are enough.")
        self._first = first

    def example(self) -> Any:
        """The first image, or all arguments of the model with a batch."""
        arguments = self._first.arguments
        is_image = len(arguments) == 1 and isinstance(arguments[0], Tensor)
        return arguments[0][:1] if is_image else arguments

    def __iter__(self) -> Iterator[_Batch]:
        for item in self._source:
            images, labels = item, None
            if isinstance(item, (tuple, list)) and item:
                images, labels = item[0], item[1] if len(item) > 1 else None
            if not isinstance(images, (Tensor, tuple, list)):
                raise MptifyError(
                    "calibrate: a batch is a tensor of images, or a tuple whose first element is "
                    f"one, not {shown(item)}."
                )
            arguments = images if isinstance(images, tuple) else (images,)
            if _count(arguments):
                yield _Batch(arguments, labels if _is_labels(labels, arguments) else None)


def _count(arguments: tuple[Any, ...]) -> int:
    """How many images these are: tensors in a list are one image each."""
    if arguments and isinstance(arguments[0], list):
        return len(arguments[0])
    return next((len(one) for one in registry.tensors_in(arguments) if one.dim() > 0), 0)


def _is_labels(labels: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether these are the number of a class for each image."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        return False
    return labels.shape == (_count(arguments),)


# -- rounding ----------------------------------------------------------------------------------


def check_activation_bits(model: nn.Module, activation_bits: int) -> None:
    """Raise unless a ticket model can be given inputs of so many bits.

    Raises:
        BadConfig: It can't, or there are no such bits.
    """
    if activation_bits != 8 or isinstance(activation_bits, bool):
        raise BadConfig(
            f"activation_bits={shown(activation_bits)}: a finished ticket can be given 8-bit "
            "inputs, or keep those of its search (None)."
        )
    found = {(one.weight_bits, one.activation_bits) for one in ticket_layers(model).values()}
    if found - {(1, 32)}:
        bits = "/".join(map(str, min(found - {(1, 32)})))
        raise BadConfig(
            f"activation_bits=8 is for 1/32 tickets, and this one has bits={bits}; leave it out."
        )


@torch.no_grad()
def round_inputs(model: nn.Module, batches: Batches) -> tuple[nn.Module, Calibration]:
    """A copy of a 1/32 ticket model whose layers round their inputs to 8 bits.

    Args:
        model: The ticket model, in `eval()`. It stays as it is.
        batches: Images to take the ranges of inputs from.

    Returns:
        The copy, and what rounding costs.

    Raises:
        MptifyError: The network can't take the images.
    """
    before = _copy(model)
    observed = {name: _observe_(layer) for name, layer in ticket_layers(before).items()}
    for batch in batches:
        _outputs(before, batch)
    whole = {one.ticket_name for one in observed.values()} - {
        one.ticket_name for one in observed.values() if not one.reads_its_own
    }
    chosen = {name: one for name, one in observed.items() if one.ticket_name in whole}
    rounded = _copy(model)
    held: dict[str, Any] = {}
    layers = ticket_layers(rounded)
    for name, one in chosen.items():
        layer = layers[name]
        ticket = layer.mask, layer.ticket_weight(), float(layer.gain), layer.kept
        round_inputs_(rounded, [name])
        layer.drop_scores_(held.get(layer.ticket_name))
        held.setdefault(layer.ticket_name, layer)
        layer.set_ticket_(*ticket)
        layer.input_quantizer.running_low.fill_(one.low)
        layer.input_quantizer.running_high.fill_(one.high)
    return rounded, _compare(_copy(model), rounded, batches)


def round_inputs_(model: nn.Module, names: Collection[str]) -> None:
    """Let 1/32 layers round their inputs to 8 bits, in place.

    Weights and ranges have still to be set.

    Args:
        model: A ticket model.
        names: The layers.

    Raises:
        KeyError: There is no such layer.
    """
    layers = ticket_layers(model)
    for name in names:
        layer = layers[name]
        if (layer.weight_bits, layer.activation_bits) != (1, 32):
            raise KeyError(f"{name} is not a layer of 1/32 bits")
        layer.activation_bits = 8
        layer.input_quantizer = RunningQuantizer().eval()
        handler = layer_registry.find(layer)
        bias = None if handler is None else layer._parameters.get(handler.bias)
        if handler is not None and bias is not None and layer.scales_output:
            setattr(layer, handler.bias, None)
            layer.output_bias = bias


def _copy(model: nn.Module) -> nn.Module:
    """A copy that shares the model's parameters, with buffers of its own."""
    copied = share_copy(model)
    buffers = {id(buffer): buffer.clone() for buffer in copied.buffers()}
    for module in copied.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffers[id(buffer)]
    return copied


@dataclass
class _Observed:
    """What a layer did while calibration images ran through it."""

    ticket_name: str
    low: float = inf
    high: float = -inf
    calls: int = 0
    reads: int = 0  # of its weight

    @property
    def reads_its_own(self) -> bool:
        """Whether the layer ran, and no other code than its own read its weight."""
        return self.calls == self.reads > 0


def _observe_(layer: Any) -> _Observed:
    """Note the range of a layer's inputs, and how often its weight is read."""
    found = _Observed(layer.ticket_name)
    operand = layer.operand

    def quantize_input(x: Tensor, quantizer: nn.Module | None = None) -> Tensor:
        found.calls += 1
        if x.numel():
            low, high = (float(extreme) for extreme in x.aminmax())
            found.low, found.high = min(found.low, low), max(found.high, high)
        return x

    def read() -> Tensor:
        found.reads += 1
        return operand()

    layer.quantize_input, layer.operand = quantize_input, read
    return found


# -- what it costs -----------------------------------------------------------------------------


def _outputs(model: nn.Module, batch: _Batch) -> Any:
    try:
        return model(*batch.arguments)
    except Exception as error:  # whatever the network's own code makes of them
        given = list(registry.tensors_in(batch.arguments))
        sizes = " and ".join("×".join(map(str, one.shape)) for one in given[:2])
        raise MptifyError(
            f"The network can't take calibration images of {sizes} ({first_line(error)}); pass a "
            "tensor of images, or batches such as [(images, labels)]."
        ) from None


def _compare(model: nn.Module, rounded: nn.Module, batches: Batches) -> Calibration:
    """Compare the outputs of two models."""
    images = same = float_right = right = 0
    has_same_shapes = is_classifier = has_labels = True
    difference = largest = torch.zeros(())
    for batch in batches:
        images += _count(batch.arguments)
        theirs, ours = _outputs(model, batch), _outputs(rounded, batch)
        pairs = list(zip(registry.tensors_in(theirs), registry.tensors_in(ours), strict=False))
        has_same_shapes &= all(one.shape == other.shape for one, other in pairs)
        for one, other in pairs if has_same_shapes else ():
            if one.is_floating_point() and one.numel():
                difference = torch.maximum(difference, (one - other).abs().max())
                largest = torch.maximum(largest, one.abs().max())
        float_classes, classes = _classes(theirs), _classes(ours)
        if float_classes is None or classes is None:
            is_classifier = False
            continue
        same += int((float_classes == classes).sum())
        if batch.labels is None:
            has_labels = False
            continue
        float_right += int((float_classes == batch.labels).sum())
        right += int((classes == batch.labels).sum())
    has_accuracy = is_classifier and has_labels
    return Calibration(
        images,
        float(difference / largest.clamp_min(1e-30)) if has_same_shapes else None,
        same / images if is_classifier else None,
        float_right / images if has_accuracy else None,
        right / images if has_accuracy else None,
    )


def _classes(output: Any) -> Tensor | None:
    """The likeliest class of each image; None if the network is not a classifier."""
    if isinstance(output, (tuple, list)) and output:  # auxiliary heads follow
        output = output[0]
    is_scores = isinstance(output, Tensor) and output.dim() == 2 and output.shape[1] > 0
    return output.argmax(1) if is_scores else None
