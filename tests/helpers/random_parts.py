"""What random networks are made of: a module that runs a list of steps, and a few blocks with code of their own."""

import operator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Step:
    """`output = kind(*inputs)`: a call of a part, or of one of the `OPERATIONS`. `when` limits it to `train()` or to `eval()`."""

    output: str
    kind: str
    inputs: tuple = ()
    part: str = ""
    options: dict = field(default_factory=dict)
    when: str = ""
    note: str = ""

    def __str__(self):
        options = [f"{key}={value}" for key, value in self.options.items()]
        call = f"{self.part or self.kind}({', '.join([*self.inputs, *options])})"
        kind = f"  [{self.kind}]" if self.part and self.kind != "part" else ""
        when = f"  if {self.when}ing else {self.inputs[0]}" if self.when else ""
        return f"{self.output} = {call}{kind}{when}{'  # ' + self.note if self.note else ''}"


class Program(nn.Module):
    """Runs its steps over named values; returns the value of the last one."""

    def __init__(self, steps=()):
        super().__init__()
        self.steps = list(steps)
        self.parts = nn.ModuleDict()

    def forward(self, x, scale=None):
        values = {"x": x}
        if scale is not None:
            values["x"] = x * scale
        for step in self.steps:
            inputs = [values[name] for name in step.inputs]
            if step.when and (step.when == "train") != self.training:
                values[step.output] = inputs[0]
            elif step.kind == "part":
                values[step.output] = self.parts[step.part](*inputs)
            else:
                values[step.output] = OPERATIONS[step.kind](self, step, *inputs)
        return values[self.steps[-1].output]

    def describe(self, indent=""):
        """The steps as text, those of programs inside them included."""
        lines = [f"{indent}{step}" for step in self.steps]
        for name, part in self.parts.items():
            lines.append(
                f"{indent}{name}: {repr(part).splitlines()[0] if isinstance(part, Program) else repr(part)}"
            )
            if isinstance(part, Program):
                lines.append(part.describe(indent + "    "))
        return "\n".join(lines)


def _bare(function):
    def run(program, step, x):
        bias = getattr(program, f"{step.part}_bias", None)
        return function(x, getattr(program, step.part), bias, **step.options)

    return run


def _call(function):
    return lambda program, step, *inputs: function(*inputs, **step.options)


def _method(name):
    return lambda program, step, x: getattr(x, name)(**step.options)


def _shuffle(program, step, x):
    groups = step.options["groups"]
    batch, channels, height, width = x.shape
    return (
        x.view(batch, groups, channels // groups, height, width)
        .transpose(1, 2)
        .reshape(batch, channels, height, width)
    )


def _doubled_while_small(program, step, x):
    """A branch that depends on the data, and is never taken."""
    return x * 2 if x.abs().max() < 1e-30 else x


def _pooled_with_indices(program, step, x):
    values, _ = F.max_pool2d(x, 2, return_indices=True)
    return values


OPERATIONS = {
    "conv1d": _bare(F.conv1d),
    "conv2d": _bare(F.conv2d),
    "conv_transpose2d": _bare(F.conv_transpose2d),
    "linear": _bare(F.linear),
    "F.relu": _call(F.relu),
    "torch.relu": _call(torch.relu),
    ".relu": _method("relu"),
    ".relu_": _method("relu_"),
    "F.relu_inplace": lambda program, step, x: F.relu(x, inplace=True),
    "F.gelu": _call(F.gelu),
    "F.silu": _call(F.silu),
    "F.silu_inplace": lambda program, step, x: F.silu(x, inplace=True),
    "F.hardswish": _call(F.hardswish),
    "F.leaky_relu": lambda program, step, x: F.leaky_relu(x, 0.1),
    "F.elu": _call(F.elu),
    "torch.tanh": _call(torch.tanh),
    "add": _call(operator.add),
    "torch.add": _call(torch.add),
    ".add": lambda program, step, x, y: x.add(y),
    "iadd": _call(operator.iadd),
    ".add_": lambda program, step, x, y: x.add_(y),
    "mul": _call(operator.mul),
    "sigmoid": _call(torch.sigmoid),
    "cat": lambda program, step, *inputs: torch.cat(inputs, **step.options),
    "chunk": lambda program, step, x: x.chunk(**step.options),
    "item": lambda program, step, x: x[step.options["index"]],
    "F.max_pool2d": _call(F.max_pool2d),
    "F.max_pool2d_indices": _pooled_with_indices,
    "F.avg_pool2d": _call(F.avg_pool2d),
    "F.adaptive_avg_pool2d": _call(F.adaptive_avg_pool2d),
    "F.adaptive_max_pool2d": _call(F.adaptive_max_pool2d),
    "interpolate": _call(F.interpolate),
    "pad": _call(F.pad),
    "F.dropout": lambda program, step, x: F.dropout(x, step.options["p"], program.training),
    "shuffle": _shuffle,
    "mean": _method("mean"),
    "flatten": lambda program, step, x: torch.flatten(x, 1),
    ".flatten": lambda program, step, x: x.flatten(2),
    "unflatten": lambda program, step, x: x.unflatten(2, step.options["sizes"]),
    ".transpose": lambda program, step, x: x.transpose(1, 2),
    ".permute": lambda program, step, x: x.permute(step.options["dims"]),
    "add_parameter": lambda program, step, x: x + getattr(program, step.part),
    "scale_parameter": lambda program, step, x: x * getattr(program, step.part),
    "prepend": lambda program, step, x: torch.cat(
        [getattr(program, step.part).expand(x.shape[0], -1, -1), x], 1
    ),
    "first": lambda program, step, x: x[:, 0],
    "tuple": lambda program, step, *inputs: tuple(inputs),
    "dict": lambda program, step, *inputs: {f"head{i}": one for i, one in enumerate(inputs)},
    "data_dependent": _doubled_while_small,
}


class SqueezeExcite(nn.Module):
    """A gate of each channel, from the channel's mean."""

    def __init__(self, channels, way):
        super().__init__()
        self.way = way
        self.reduce, self.expand = (
            nn.Conv2d(channels, max(2, channels // 2), 1),
            nn.Conv2d(max(2, channels // 2), channels, 1),
        )
        self.pool, self.gate = (
            nn.AdaptiveAvgPool2d(1),
            nn.Hardsigmoid() if way == "module" else nn.Sigmoid(),
        )

    def forward(self, x):
        if self.way == "module":
            pooled = self.pool(x)
        elif self.way == "function":
            pooled = F.adaptive_avg_pool2d(x, 1)
        else:
            pooled = x.mean((2, 3), keepdim=True)
        gate = self.gate(self.expand(F.relu(self.reduce(pooled), inplace=True)))
        return x.mul_(gate) if self.way == "inplace" else x * gate


class ChannelAttention(nn.Module):
    """A gate of each channel, from a 1d conv over its neighbours' means."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x):
        pooled = x.mean((2, 3)).unsqueeze(1)
        return x * self.conv(pooled).sigmoid().view(x.shape[0], -1, 1, 1)


class ChannelsLastNorm(nn.Module):
    """A LayerNorm over the channels of an image."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class HandAttention(nn.Module):
    """Attention written out, as timm's and many others' are."""

    def __init__(self, width, heads, way, dropout):
        super().__init__()
        self.heads, self.way, self.scale = heads, way, (width // heads) ** -0.5
        if way == "separate":
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        else:
            self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.drop, self.proj = nn.Dropout(dropout), nn.Linear(width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        if self.way == "separate":
            q, k, v = (
                one(x).view(batch, tokens, self.heads, -1).transpose(1, 2)
                for one in (self.q, self.k, self.v)
            )
        else:
            q, k, v = (
                self.qkv(x)
                .reshape(batch, tokens, 3, self.heads, -1)
                .permute(2, 0, 3, 1, 4)
                .unbind(0)
            )
        if self.way == "fused":
            x = F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.drop.p if self.training else 0.0
            )
        else:
            x = self.drop((q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1)) @ v
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, width))


class TorchAttention(nn.Module):
    """Around `nn.MultiheadAttention`: to oneself, or of the first token to all others."""

    def __init__(self, width, heads, batch_first, crossed, dropout):
        super().__init__()
        self.attention = nn.MultiheadAttention(
            width, heads, dropout=dropout, batch_first=batch_first
        )
        self.crossed = crossed

    def forward(self, x):
        first = self.attention.batch_first
        x = x if first else x.transpose(0, 1)
        query = x[:, :1] if first else x[:1]
        y, _ = self.attention(query if self.crossed else x, x, x, need_weights=self.crossed)
        y = y.expand_as(x).contiguous() if self.crossed else y
        return y if first else y.transpose(0, 1)


class Mlp(nn.Module):
    """Two linear layers: with an activation between them, or with half of the first gating its other half."""

    def __init__(self, width, hidden, activation, gated, dropout):
        super().__init__()
        self.fc1, self.fc2 = (
            nn.Linear(width, 2 * hidden if gated else hidden),
            nn.Linear(hidden, width),
        )
        self.act, self.drop, self.gated = activation, nn.Dropout(dropout), gated

    def forward(self, x):
        x = self.fc1(x)
        if self.gated:
            x, gate = x.chunk(2, dim=-1)
            x = self.act(gate) * x
        else:
            x = self.act(x)
        return self.fc2(self.drop(x))


class TokenConv(nn.Module):
    """A depthwise conv over tokens that are an image's patches."""

    def __init__(self, width, size):
        super().__init__()
        self.size, self.conv = size, nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x):
        return x + self.conv(x.transpose(1, 2).unflatten(2, (self.size, self.size))).flatten(
            2
        ).transpose(1, 2)


class TokenMixer(nn.Module):
    """A linear layer over the tokens of each channel."""

    def __init__(self, tokens):
        super().__init__()
        self.mix = nn.Linear(tokens, tokens)

    def forward(self, x):
        return self.mix(x.transpose(1, 2)).transpose(1, 2)
