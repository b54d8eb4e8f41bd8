"""`nn.MultiheadAttention` with tickets as weights, registered as a composite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mptify.nn.leaf import recorded_call
from mptify.surgery.layer_registry import CompositeHandler, register

__all__ = ["TicketMultiheadAttention"]


class TicketMultiheadAttention(nn.MultiheadAttention):
    """An attention that reads its projection weights from tickets.

    With 32-bit activations it runs torch's own attention. With fewer bits it quantizes the input
    of each projection first, including the input of the output projection. Queries, keys and
    values that are not one tensor get a norm each, since their statistics may differ.
    """

    key_quantizer: Any  # an `InputQuantizer` each, or None in self-attention
    value_quantizer: Any

    @staticmethod
    def convert_(
        module: nn.MultiheadAttention, tickets: dict[str, Any], quantizers: dict[str, nn.Module]
    ) -> None:
        """Turn `module` into a ticket attention in place, with tickets in place of parameters."""
        for attribute, ticket in tickets.items():
            del module._parameters[attribute]
            module.add_module(f"{attribute}_ticket", ticket)
        for argument in ("key", "value"):
            module._modules[f"{argument}_quantizer"] = quantizers.get(argument)
        module.__class__ = TicketMultiheadAttention

    def _weight(self, attribute: str) -> Tensor | None:
        ticket: Any = self._modules.get(f"{attribute}_ticket")
        return self._parameters.get(attribute) if ticket is None else ticket.weight

    in_proj_weight = property(lambda self: self._weight("in_proj_weight"))
    q_proj_weight = property(lambda self: self._weight("q_proj_weight"))
    k_proj_weight = property(lambda self: self._weight("k_proj_weight"))
    v_proj_weight = property(lambda self: self._weight("v_proj_weight"))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        given = (
            query,
            key,
            value,
            key_padding_mask,
            need_weights,
            attn_mask,
            average_attn_weights,
            is_causal,
        )
        recorded: Any = recorded_call(self, given, {})
        if recorded is not None:
            return recorded
        if getattr(self.out_proj, "activation_bits", 32) == 32:
            return super().forward(*given)
        batched = query.dim() == 3
        if not batched:
            query, key, value = (
                one.unsqueeze(0 if self.batch_first else 1) for one in (query, key, value)
            )
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        first = 0 if self.batch_first else 1
        same = query is key and key is value
        projected = self._project(query, key, value, same)
        if not self.batch_first:
            projected = [one.transpose(0, 1) for one in projected]
        q, k, v = (_split_heads(one, self.num_heads) for one in projected)
        if self.bias_k is not None:
            k, v = self._append(k, self.bias_k), self._append(v, self.bias_v)
        if self.add_zero_attn:
            k, v = (F.pad(one, (0, 0, 0, 1)) for one in (k, v))
        mask = _merged_mask(attn_mask, key_padding_mask, q, k, self.num_heads)
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            weights = torch.softmax(logits if mask is None else logits + mask, dim=-1)
            attended = F.dropout(weights, dropout) @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            attended = F.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal and mask is None
            )
            weights = None
        out = attended.transpose(1, 2).flatten(2)
        out = self.out_proj(out if self.batch_first else out.transpose(0, 1))
        if not batched:
            out = out.squeeze(first)
            weights = None if weights is None else weights.squeeze(0)
        return out, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor, same: bool) -> list[Tensor]:
        bias = self.in_proj_bias
        if not self._qkv_same_embed_dim:
            biases = (None, None, None) if bias is None else bias.chunk(3)
            return [
                getattr(self, f"{name}_proj_weight_ticket").run(F.linear, one, offset)
                for name, one, offset in zip("qkv", (query, key, value), biases, strict=True)
            ]
        ticket: Any = self.in_proj_weight_ticket
        if same and self.key_quantizer is None:
            return list(ticket.run(F.linear, query, bias).chunk(3, dim=-1))
        quantizers = (None, self.key_quantizer, self.value_quantizer)
        return [
            ticket.run(F.linear, one, bias, quantizer=quantizer).chunk(3, dim=-1)[i]
            for i, (one, quantizer) in enumerate(zip((query, key, value), quantizers, strict=True))
        ]

    def _append(self, heads: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None
        return torch.cat(
            [
                heads,
                _split_heads(bias.transpose(0, 1).expand(heads.shape[0], -1, -1), self.num_heads),
            ],
            2,
        )


@register(nn.MultiheadAttention)
def _attention(layer: Any) -> CompositeHandler:
    return CompositeHandler(
        weights={
            "in_proj_weight": ("query", "key", "value"),
            "q_proj_weight": ("query",),
            "k_proj_weight": ("key",),
            "v_proj_weight": ("value",),
        },
        outputs=layer.embed_dim,
        convert_=TicketMultiheadAttention.convert_,
        biases=("in_proj_bias",),
    )


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _merged_mask(
    attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor, heads: int
) -> Tensor | None:
    total = None
    if attn_mask is not None:
        wide = (
            attn_mask if attn_mask.dim() == 2 else attn_mask.view(-1, heads, *attn_mask.shape[-2:])
        )
        total = F.pad(_additive(wide, q), (0, k.shape[2] - wide.shape[-1]))
    if padding is not None:
        wide = F.pad(_additive(padding, q), (0, k.shape[2] - padding.shape[-1]))[:, None, None]
        total = wide if total is None else total + wide
    return total


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(
        mask, -torch.inf
    )
