"""Rewrite a network as planned: swap its layers, then edit the graphs whose edges change."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mptify.nn.layers import Ticketed, TicketParameter
from mptify.nn.quantizers import InputQuantizer, RunningQuantizer, make_quantizer
from mptify.registry import scopes
from mptify.surgery import layer_registry
from mptify.surgery.classifier import reset_classifier_
from mptify.surgery.edges import edited_region, make_norm
from mptify.surgery.graphs import TicketGraph, answers_of
from mptify.surgery.plans import NormBefore, Plan, PlannedLayer
from mptify.surgery.trace import Traced
from mptify.surgery.trainable import let_train_, reset_norms_

__all__ = ["rewrite"]


def rewrite(traced: Traced, plan: Plan) -> nn.Module:
    """Apply `plan` to the copy that `traced` holds, and return it as the ticket model.

    The result shares nothing with the original model, and only what the config names requires
    grad. `traced` cannot be used again.
    """
    model: Any = traced.model
    config = plan.config
    like = next(tensor for tensor in model.parameters() if tensor.is_floating_point())
    answers = answers_of(model)
    _own_tensors_(model, plan)
    layers = _swap_layers_(model, plan)
    model = layers.get("", model)  # the model was a single layer
    for region in traced.regions:
        edits = plan.edits.get(region.path)
        if edits and any(edits.values()):
            graph = edited_region(region, edits, layers, config, like)
            if region.path:
                _replace_everywhere_(model, {id(model.get_submodule(region.path)): graph})
            else:
                model = graph
    _no_fast_paths_(model)
    for part in list(model.modules()):
        for child in part.children():
            if isinstance(child, (InputQuantizer, RunningQuantizer)):
                child.train(part.training)
    if config.init != "keep":
        reset_norms_(model)
    scopes[config.scope](list(layers.values()), config.prune, config.floor)
    let_train_(model, plan)
    model.ticket_plan = plan
    if isinstance(model, TicketGraph):
        model.keep_answers_(answers)
        model.reset_classifier_with = reset_classifier_
    return model


# -- layers ----------------------------------------------------------------------------------------


def _own_tensors_(model: nn.Module, plan: Plan) -> None:
    """Copy all tensors except weights that are about to be replaced."""
    replaced = (
        set() if plan.config.init == "keep" else {_place_of(model, layer) for layer in plan.layers}
    )
    copies: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # deepcopy has copied its tensors
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None or (id(module), name) in replaced:
                    continue
                if id(tensor) not in copies:
                    fresh = tensor.detach().clone()
                    copies[id(tensor)] = (
                        nn.Parameter(fresh, tensor.requires_grad)
                        if isinstance(tensor, nn.Parameter)
                        else fresh
                    )
                store[name] = copies[id(tensor)]
        if isinstance(module, nn.RNNBase):  # which computes with this list
            module._flat_weights = [
                module._parameters.get(name) for name in module._flat_weights_names
            ]


def _place_of(model: nn.Module, layer: PlannedLayer) -> tuple[int, str]:
    """The module that holds the weight of a planned layer, and the weight's name there."""
    if layer.functional:
        return id(model.get_submodule(layer.owner)), layer.name.rpartition(".")[2]
    module = model.get_submodule(layer.name)
    handler = layer_registry.find(module)
    assert handler is not None
    return id(module), handler.weight


def _swap_layers_(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """Replace the planned layers by ticket layers wherever they occur; return these by name."""
    tickets: dict[str, Any] = {}
    swaps: dict[int, nn.Module] = {}
    owners: dict[str, dict[str, Any]] = {}
    quantizers: dict[str, dict[str, nn.Module]] = {}
    without_bias: dict[int, tuple[str, torch.Tensor]] = {}
    for planned in plan.layers:
        if planned.functional:
            attribute = planned.name.rpartition(".")[2]
            parameter: Any = model.get_submodule(planned.owner)._parameters[attribute]
            axis = 1 if planned.kind.startswith("F.conv") else -1
            fan_in = (
                parameter[0].numel() if "transpose" not in planned.kind else parameter[:, 0].numel()
            )
            ticket: Any = TicketParameter(
                parameter, plan.config, name=planned.name, fan_in=fan_in, axis=axis
            )
            owners.setdefault(planned.owner, {})[attribute] = ticket
        else:
            original = model.get_submodule(planned.name)
            handler = layer_registry.find(original)
            assert handler is not None
            ticket = handler.convert(original, plan.config, planned.name)
            swaps[id(original)] = ticket
            bias = getattr(original, handler.bias, None)
            if plan.config.bias == "drop" and isinstance(bias, torch.Tensor):
                without_bias[id(ticket)] = (handler.bias, bias)
        if planned.tied_to:
            ticket.tie_to_(tickets[planned.tied_to])
        ticket.weight_escapes = planned.weight_escapes
        if planned.quantizes_input:
            ticket.input_quantizer = _input_quantizer(ticket, planned, plan)
        for argument in planned.separate_inputs:
            quantizer = _input_quantizer(ticket, planned, plan)
            quantizers.setdefault(planned.owner, {})[argument] = quantizer
        tickets[planned.name] = ticket
    _replace_everywhere_(model, swaps)
    _zero_biases_for_fusing_(model, without_bias)
    for owner_name, parameters in owners.items():
        owner = model.get_submodule(owner_name)
        for ticket in parameters.values():
            ticket.train(owner.training)
        composite = layer_registry.find_composite(owner)
        if composite is None:
            _give_properties_(owner, parameters)
            continue
        composite.convert_(owner, parameters, quantizers.get(owner_name, {}))
        if plan.config.bias == "drop":
            for name in composite.biases:
                owner.register_parameter(name, None)
    return tickets


def _input_quantizer(ticket: Any, planned: PlannedLayer, plan: Plan) -> nn.Module:
    like = torch.empty(0, dtype=ticket.compute_dtype, device=ticket.scores.device)
    if plan.config.activation_bits == 8:
        return RunningQuantizer(like)
    norm = make_norm(NormBefore(planned.in_channels, ticket.channel_axis), plan.config, like)
    return InputQuantizer(norm, make_quantizer(plan.config, signed=True, like=like))


def _replace_everywhere_(model: nn.Module, swaps: dict[int, nn.Module]) -> None:
    """Replace modules under all of their names."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and id(child) in swaps:
                parent._modules[name] = swaps[id(child)]


def _zero_biases_for_fusing_(
    model: nn.Module, without_bias: dict[int, tuple[str, torch.Tensor]]
) -> None:
    """Give dropped biases a buffer of zeros in blocks that can fuse their branches.

    `timm.utils.reparameterize_model` adds the biases of such layers. Files do not store the buffer.
    """
    for module in model.modules():
        if any(
            callable(getattr(type(module), name, None))
            for name in ("fuse", "reparameterize", "switch_to_deploy")
        ):
            for child in module.children():
                if (
                    id(child) in without_bias
                    and isinstance(child, Ticketed)
                    and not child.scales_output
                ):
                    name, bias = without_bias[id(child)]
                    child._parameters.pop(name)
                    child.register_buffer(name, torch.zeros_like(bias), persistent=False)


def _no_fast_paths_(model: nn.Module) -> None:
    """Turn off the fused kernels of torch's encoder layers, which bypass the ticket layers."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _give_properties_(owner: nn.Module, parameters: dict[str, Any]) -> None:
    """Make `owner.<name>` compute the ticket's weight, for a `forward` that reads it."""
    for attribute, ticket in parameters.items():
        del owner._parameters[attribute]
        owner.add_module(f"{attribute}_ticket", ticket)
    owner.__class__ = _owner_class(type(owner), tuple(sorted(parameters)))


_OWNER_CLASSES: dict[tuple, type] = {}


def _owner_class(base: type, attributes: tuple[str, ...]) -> type:
    key = (base, attributes)
    if key not in _OWNER_CLASSES:
        body: dict[str, Any] = {name: _computed_weight(name) for name in attributes}
        body["__reduce__"] = lambda self: (_empty_owner, (base, attributes), self.__dict__)
        body["__module__"] = base.__module__
        body["original_type"] = base
        return _OWNER_CLASSES.setdefault(key, type(base.__name__, (base,), body))
    return _OWNER_CLASSES[key]


def _computed_weight(name: str) -> property:
    return property(lambda self: self._modules[f"{name}_ticket"].weight)


def _empty_owner(base: type, attributes: tuple[str, ...]) -> Any:
    cls: Any = _owner_class(base, attributes)
    return cls.__new__(cls)
