"""`dense`: a state dict that the ticket's torchvision or timm network loads without mptify."""

from __future__ import annotations

import safetensors.torch
import torch
from torch import Tensor, nn

from mptify.errors import MptifyError
from mptify.export.target import Artifact, ExportTarget
from mptify.models import registry
from mptify.models.init_mode import InitMode
from mptify.nn.layers import TicketParameter
from mptify.registry import export_targets
from mptify.surgery import ticket_layers
from mptify.ticket.codec import Ticket


@export_targets.register("dense")
class Dense(ExportTarget):
    """A safetensors file of effective weights, for tickets of 32-bit activations."""

    suffix = ".safetensors"

    def make(self, ticket: Ticket, model: nn.Module, images: Tensor) -> Artifact:
        if ticket.config.activation_bits == 1:
            bits = ticket.config.bits
            raise MptifyError(
                f"A ticket of {bits} bits has signs where its dense network has activations; --to "
                "onnx keeps them."
            )
        assert ticket.architecture is not None
        with InitMode("constant"):
            network = registry.build(
                registry.resolve(str(ticket.architecture)), **ticket.architecture.arguments
            ).eval()
        state = _state_for(network, model)
        network.load_state_dict(state)
        return Artifact(safetensors.torch.save(state, {"format": "pt"}), network)


def _state_for(network: nn.Module, model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the dense network; biases that the ticket dropped are 0."""
    found: dict[str, Tensor] = {}
    ours, layers = model.state_dict(), {}
    for layer in ticket_layers(model).values():
        own = layer.ticket_name
        layers[
            own if isinstance(layer, TicketParameter) else f"{own}.{layer.weight_name}".lstrip(".")
        ] = layer
    for name, tensor in network.state_dict().items():
        layer = layers.get(name)
        if layer is not None:
            found[name] = layer.ticket_weight().detach().reshape(tensor.shape).contiguous().clone()
        elif name in ours and ours[name].shape == tensor.shape:
            found[name] = ours[name].detach().contiguous().clone()
        elif name.endswith("bias"):
            found[name] = torch.zeros_like(tensor)
        else:
            raise MptifyError(
                f"{name}: the ticket has no value for it, since its network is not the dense one "
                "with other weights."
            )
    extra = [name for name in ours if name.endswith("running_mean") and name not in found]
    if extra:
        raise MptifyError(
            f"{extra[0].rpartition('.')[0]}: the ticket's network has a norm that the dense one "
            "lacks; --to onnx keeps it."
        )
    return found
