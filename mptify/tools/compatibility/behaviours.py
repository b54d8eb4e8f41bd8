"""The behaviours of timm: each is one function here, and one column of the table."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mptify.models.registry import tensors_in
from mptify.surgery import ticket_layers

__all__ = ["BEHAVIOURS", "Behaviour", "Network", "outputs_of"]


@dataclass(frozen=True)
class Network:
    """The subject of a behaviour: a dense network, or the ticket that `convert` makes from it."""

    model: Any
    images: Tensor
    calls: dict[str, int]  # of each layer in one `forward` of the dense network
    build: Callable[..., nn.Module]  # builds the dense network, with extra arguments for timm
    convert: Callable[[nn.Module], nn.Module]

    def copy(self) -> Any:
        return copy.deepcopy(self.model)


class Differs(Exception):
    """A behaviour ran, but with a wrong result."""


Run = Callable[[Network], Any]


@dataclass(frozen=True)
class Behaviour:
    """A behaviour of timm. For a network and its ticket, `run` must return the same."""

    run: Run
    what: str
    note: str


BEHAVIOURS: dict[str, Behaviour] = {}


def behaviour(name: str, what: str, note: str) -> Callable[[Run], Run]:
    """Add a column to the table. `note` says what each mode keeps and what to do about the rest."""

    def add(run: Run) -> Run:
        BEHAVIOURS[name] = Behaviour(run, what, note)
        return run

    return add


@behaviour(
    "features, head",
    "`forward_features` and `forward_head`",
    "In 1/1 they run their parts of the graph. They are refused where `forward` is not the head of "
    "the features; a feature extractor returns any value.",
)
def _features_and_head(network: Network) -> Any:
    model, images = network.model, network.images
    outputs = model(images)
    both = model.forward_head(model.forward_features(images))
    _require_close(both, outputs, "forward_head(forward_features(x))")
    return _shapes(outputs)


@behaviour(
    "intermediates",
    "`forward_intermediates`",
    "1/1 refuses it: this method repeats the loop over the blocks, and a graph has no such loop. "
    "A feature extractor returns the same values.",
)
def _intermediates(network: Network) -> Any:
    features, intermediates = network.model.forward_intermediates(network.images)
    expected = network.model.forward_features(network.images)
    _require_close(features, expected, "the features of forward_intermediates(x)")
    return _shapes(features), _shapes(intermediates)


@behaviour(
    "reset",
    "`reset_classifier`",
    "In 1/1 the new classifier is a ticket layer with fresh scores, in 1/32 timm's dense layer. "
    "1/1 refuses it where several layers make the output: choose `num_classes` before `transform`.",
)
def _reset_classifier(network: Network) -> Any:
    model = network.copy()
    model.reset_classifier(7)
    return _shapes(model(network.images)), model.num_classes


@behaviour(
    "checkpointing",
    "`set_grad_checkpointing`",
    "1/1 refuses it: a graph has no blocks to recompute. `torch.utils.checkpoint.checkpoint(model, "
    "x, use_reentrant=False)` recomputes the whole network.",
)
def _grad_checkpointing(network: Network) -> Any:
    plain, saving = network.copy().train(), network.copy().train()
    saving.set_grad_checkpointing(True)
    outputs, gradients = _train_step(plain, network.images)
    outputs_saving, gradients_saving = _train_step(saving, network.images)
    _require_close(outputs_saving, outputs, "the outputs with checkpoints")
    if gradients.keys() != gradients_saving.keys():
        raise Differs("with checkpoints, other parameters get gradients")
    for name, gradient in gradients.items():
        _require_close(gradients_saving[name], gradient, f"the gradient of {name}")
    return _shapes(outputs)


@behaviour(
    "features_only",
    "`create_model(features_only=True)`, then `transform`",
    "Networks that timm wraps to return several feature maps are converted with the wrapper, "
    "whether it rebuilds the network, sets hooks or calls `forward_intermediates`.",
)
def _features_only(network: Network) -> Any:
    try:
        dense = network.build(features_only=True)
    except AssertionError:  # timm takes the last three blocks, but some of these networks have two
        dense = network.build(features_only=True, out_indices=2)
    model: Any = network.convert(dense).eval()
    return _shapes(model(network.images)), model.feature_info.channels()


@behaviour(
    "torchvision extractor",
    "torchvision's `create_feature_extractor`",
    "Layers keep their names, and ticket layers are single nodes. Extractors share their scores.",
)
def _torchvision_extractor(network: Network) -> Any:
    from torchvision.models.feature_extraction import create_feature_extractor

    return _extract(network, create_feature_extractor)


@behaviour("timm extractor", "timm's `create_feature_extractor`", "The same.")
def _timm_extractor(network: Network) -> Any:
    from timm.models import create_feature_extractor

    return _extract(network, create_feature_extractor)


def _extract(network: Network, create: Callable[..., Any]) -> Any:
    once = [name for name, calls in network.calls.items() if calls == 1]
    names = [once[0], once[len(once) // 2], once[-1]]
    found = create(network.copy(), names)(network.images)
    expected = outputs_of(network.model, names, network.images)
    for name in names:
        _require_close(found[name], expected[name][0], f"what was extracted from {name}")
    return _shapes(found)


@behaviour("EMA", "`ModelEmaV3`", "The scores are averaged, and the mask follows the averages.")
def _moving_average(network: Network) -> Any:
    from timm.utils import ModelEmaV3

    model = network.copy()
    average = ModelEmaV3(model, decay=0.9)
    before = {name: one.clone() for name, one in model.named_parameters()}
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.mul_(1.5)
    average.update(model)
    shares = set()  # of each step: 0.1, or more where timm counts a shared parameter twice
    for name, one in average.module.named_parameters():
        step = (model.get_parameter(name) - before[name]).norm()
        if step > 0:
            shares.add(round(float((one - before[name]).norm() / step), 3))
    return shares, _shapes(average.module.eval()(network.images))


@behaviour(
    "layer decay",
    "`create_optimizer_v2(layer_decay=…)`",
    "A layer's scores get the learning rate that its weights would get.",
)
def _layer_decay(network: Network) -> Any:
    from timm.optim import create_optimizer_v2

    model = network.model
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    groups = optimizer.param_groups
    scales = {id(one): group["lr_scale"] for group in groups for one in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in scales:
            raise Differs(f"{name} is in no group")
    if not hasattr(model, "group_matcher"):
        return None  # timm then groups parameters by twelve, and a ticket has others
    layers = {name: model.get_submodule(name) for name, calls in network.calls.items() if calls}
    tickets = ticket_layers(model)
    trained = {name: one.scores if name in tickets else one.weight for name, one in layers.items()}
    return {name: round(scales[id(one)], 9) for name, one in trained.items() if id(one) in scales}


@behaviour("data config", "`resolve_model_data_config`", "A ticket takes its network's images.")
def _data_config(network: Network) -> Any:
    from timm.data import resolve_model_data_config

    return resolve_model_data_config(network.model)


@behaviour(
    "pickle",
    "`pickle` and `torch.save` of the whole model",
    "`mptify.save` writes a smaller file, which holds no code.",
)
def _pickled(network: Network) -> Any:
    buffer = io.BytesIO()
    torch.save(network.model, buffer)
    buffer.seek(0)
    expected = network.model(network.images)
    unpickled = pickle.loads(pickle.dumps(network.model))
    for model in (unpickled, torch.load(buffer, weights_only=False)):
        _require_close(model(network.images), expected, "a copy's outputs", 0.0)
    return _shapes(expected)


@behaviour(
    "reparameterize",
    "`reparameterize_model`",
    "In 1/32 fused layers are dense, for inference only. In 1/1 signs stand between the layers, so "
    "nothing is fused, and the ticket comes back as it was.",
)
def _reparameterized(network: Network) -> Any:
    from timm.utils.model import reparameterize_model

    model = network.copy()
    if not ticket_layers(model):
        ways = ("fuse", "reparameterize", "switch_to_deploy")
        if not any(hasattr(module, way) for module in model.modules() for way in ways):
            raise Differs("nothing in this network can be fused")
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                module.bias = None  # as in a ticket; some of timm's code requires biases
    fused = reparameterize_model(model).eval()
    _require_close(fused(network.images), model(network.images), "the outputs afterwards", 1e-3)
    return _shapes(fused(network.images))


def _shapes(outputs: Any) -> list[list[int]]:
    return [list(one.shape) for one in tensors_in(outputs)]


def _require_close(found: Any, expected: Any, what: str, tolerance: float = 1e-4) -> None:
    if _shapes(found) != _shapes(expected):
        raise Differs(f"{what}: shapes {_shapes(found)} instead of {_shapes(expected)}")
    for one, other in zip(tensors_in(found), tensors_in(expected), strict=True):
        if not torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True):
            raise Differs(f"{what}: different numbers")


def _train_step(model: nn.Module, images: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """The outputs and gradients of one step, always with the same dropout."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(1)
        outputs = model(images)
        torch.stack([one.float().square().mean() for one in tensors_in(outputs)]).sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return outputs, gradients


def outputs_of(model: nn.Module, names: Iterable[str], images: Tensor) -> dict[str, list[Any]]:
    """Collect the outputs of modules.

    Args:
        model: The network.
        names: The names of modules in it.
        images: The input.

    Returns:
        For each name, the outputs of all its calls in one `forward`.
    """
    outputs: dict[str, list[Any]] = {name: [] for name in names}
    with contextlib.ExitStack() as hooks:
        for name, seen in outputs.items():
            layer = model.get_submodule(name)
            hook = layer.register_forward_hook(lambda *call, seen=seen: seen.append(call[-1]))
            hooks.enter_context(hook)
        model(images)
    return outputs
