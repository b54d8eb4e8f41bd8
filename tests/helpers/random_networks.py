"""Random CNNs and transformers, each made from an integer.

    network = random_network(17)
    network.model(*network.inputs)
    print(network)                  # the steps that it runs

Neither reads nor changes global random state: a `random.Random` draws the structure, a `torch.Generator` the weights.
"""

import random
from dataclasses import dataclass

import torch
from torch import nn

from tests.helpers.random_parts import (
    ChannelAttention,
    ChannelsLastNorm,
    HandAttention,
    Mlp,
    Program,
    SqueezeExcite,
    Step,
    TokenConv,
    TokenMixer,
    TorchAttention,
)

CLASSES = 5


@dataclass(frozen=True)
class RandomNetwork:
    """A network, inputs for it, and the names of what it contains."""

    seed: int
    model: nn.Module
    inputs: tuple
    features: frozenset

    def __str__(self):
        shapes = ", ".join(
            f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in self.inputs
        )
        return f"random_network({self.seed}) on {shapes}\n{self.model.describe()}"


def random_network(seed):
    """The network of this seed: three CNNs to every two transformers."""
    maker = _Maker(random.Random(seed))
    with torch.device("meta"):
        model, make_inputs = maker.transformer() if seed % 5 in (1, 3) else maker.cnn()
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    _fill_(model, generator)
    for one, other in maker.tied:
        one.weight = other.weight
    if any(_overwrites(part) for part in model.modules() if isinstance(part, Program)):
        maker.has("in place on a value read elsewhere")
    return RandomNetwork(seed, model, make_inputs(generator), frozenset(maker.features))


def _overwrites(program):
    """Whether a step changes a value in place that another one reads too."""
    reads = [name for step in program.steps for name in step.inputs]
    inplace = [step for step in program.steps if step.kind.endswith(("_", "inplace", "iadd"))]
    return any(reads.count(step.inputs[0]) > 1 for step in inplace)


@torch.no_grad()
def _fill_(model, generator):
    for module in model.modules():
        for name, value in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            noise = (
                torch.randn(value.shape, generator=generator)
                if value.is_floating_point()
                else torch.zeros(value.shape)
            )
            if value.dim() > 1:
                value.copy_(noise / value[0].numel() ** 0.5)
            elif "var" in name:
                value.copy_(1 + 0.1 * noise.abs())
            elif name == "weight":  # a norm's, or a slope
                value.copy_((0.25 if isinstance(module, nn.PReLU) else 1) + 0.1 * noise)
            else:
                value.copy_(0.1 * noise)


class _Maker:
    """Draws structures. `features` names what was drawn."""

    def __init__(self, draw):
        self.draw, self.features, self.tied = draw, set(), []
        self.norm = draw.choice(["batch", "batch", "layer", "group", "none"])
        self.activation = draw.choice(["any", "any", "relu", "gelu", "silu", "hardswish"])
        self.shared_activation = None

    def chance(self, probability):
        return self.draw.random() < probability

    def has(self, *features):
        self.features.update(features)

    # -- CNNs ----------------------------------------------------------------------------------------------------------

    def cnn(self):
        size, channels = self.draw.choice([16, 20, 24, 32]), self.draw.choice([1, 3, 3, 3])
        build = _Image(self, (channels, size, size))
        build.conv(self.draw.choice([6, 8, 12, 16]), stride=self.draw.choice([1, 1, 2]), groups=1)
        build.normalise()
        build.activate()
        for _ in range(self.draw.randint(6, 12)):
            build.anything(depth=2)
        build.merge_unread()
        build.heads()
        return build.program, lambda generator: (
            torch.randn(4, channels, size, size, generator=generator),
        )

    # -- transformers --------------------------------------------------------------------------------------------------

    def transformer(self):
        build = _Tokens(self, self.draw.choice([8, 16, 24, 32]))
        make_inputs = build.embed()
        for _ in range(self.draw.randint(1, 3)):
            build.block()
        build.heads()
        return build.program, make_inputs

    # -- parts ---------------------------------------------------------------------------------------------------------

    def activation_module(self, channels=None, may_overwrite=True):
        kind = (
            self.activation
            if self.activation != "any"
            else self.draw.choice(["relu", "gelu", "silu", "hardswish", "leaky", "prelu", "elu"])
        )
        inplace = (
            self.chance(0.4) and may_overwrite and kind in ("relu", "silu", "hardswish", "leaky")
        )
        self.has(f"{kind} module", *(["in place"] if inplace else []))
        if kind in ("gelu", "prelu", "elu"):
            return {"gelu": nn.GELU(), "prelu": nn.PReLU(channels or 1), "elu": nn.ELU()}[kind]
        classes = {
            "relu": nn.ReLU,
            "silu": nn.SiLU,
            "hardswish": nn.Hardswish,
            "leaky": lambda inplace: nn.LeakyReLU(0.1, inplace),
        }
        return classes[kind](inplace=inplace)

    def activation_function(self):
        names = {
            "relu": ["F.relu", "torch.relu", ".relu", ".relu_", "F.relu_inplace"],
            "gelu": ["F.gelu"],
            "silu": ["F.silu", "F.silu_inplace"],
            "hardswish": ["F.hardswish"],
            "others": ["F.leaky_relu", "F.elu", "torch.tanh"],
        }
        kind = self.activation if self.activation != "any" else self.draw.choice(list(names))
        name = self.draw.choice(names[kind])
        self.has(f"{kind} function", *(["in place"] if name.endswith(("_", "inplace")) else []))
        return name


class _Build:
    """Adds steps to a program, and knows the shape of each value (without the batch)."""

    def __init__(self, maker, shape):
        self.maker, self.draw, self.chance, self.has = maker, maker.draw, maker.chance, maker.has
        self.program = Program()
        self.shapes, self.now, self.unread = {"x": shape}, "x", set()

    @property
    def shape(self):
        return self.shapes[self.now]

    def step(self, kind, *inputs, shape=None, part="", when="", note="", **options):
        """Add a step; without inputs it reads the newest value. Its own value is the newest afterwards."""
        inputs = inputs or (self.now,)
        output = f"v{len(self.program.steps)}"
        self.program.steps.append(Step(output, kind, inputs, part, options, when, note))
        self.unread -= set(inputs)
        self.unread.add(output)
        self.shapes[output] = self.shapes[inputs[0]] if shape is None else shape
        self.now = output
        return output

    def part(self, module, *inputs, shape=None, when="", name=None):
        if name is None:
            name = f"{type(module).__name__.lower()}{len(self.program.parts)}"
            self.program.parts[name] = module
        return self.step("part", *inputs, part=name, shape=shape, when=when)

    def parameter(self, stem, *shape):
        name = f"{stem}{len(self.program.steps)}"
        self.program.register_parameter(name, nn.Parameter(torch.empty(shape)))
        return name

    def activate(self):
        maker = self.maker
        if self.chance(0.45):
            self.step(maker.activation_function())
        elif self.chance(0.25) and maker.shared_activation in self.program.parts:
            maker.has("shared activation")
            self.part(None, name=maker.shared_activation)
        else:
            self.part(maker.activation_module(self.shape[0] if len(self.shape) == 3 else None))
            if not isinstance(list(self.program.parts.values())[-1], nn.PReLU):
                maker.shared_activation = self.program.steps[-1].part

    def dropout(self):
        self.has("dropout")
        if self.chance(0.5):
            self.step("F.dropout", p=0.2)
        else:
            self.part(
                self.draw.choice(
                    [nn.Dropout(0.2), nn.Dropout2d(0.2)]
                    if len(self.shape) == 3
                    else [nn.Dropout(0.2)]
                )
            )

    def head(self, features, *inputs):
        """From features to scores of the classes."""
        if self.chance(0.3):
            self.has("bare linear")
            name = self.parameter("matrix", CLASSES, features)
            if self.chance(0.5):
                self.program.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(CLASSES)))
            return self.step("linear", *inputs, part=name, shape=(CLASSES,))
        if self.chance(0.25):
            self.has("hidden layer in a head")
            self.part(nn.Linear(features, 16), *inputs, shape=(16,))
            self.activate()
            features, inputs = 16, ()
        return self.part(
            nn.Linear(features, CLASSES, bias=self.chance(0.8)), *inputs, shape=(CLASSES,)
        )

    def answer(self, heads):
        if len(heads) > 1:
            self.has("several heads")
            self.step(self.draw.choice(["tuple", "dict"]), *heads)


class _Image(_Build):
    """Programs over images: shapes are (channels, height, width)."""

    def anything(self, depth):
        channels, size, _ = self.shape
        actions = {
            "layers": 8,
            "skip": 2,
            "join": 2,
            "gate": 1,
            "shuffle": 1,
            "dropout": 1,
            "split": 1,
            "line": 1,
            "pad": 0.4,
        }
        actions |= {"pool": 3} if size >= 8 else {}
        actions |= {"grow": 1.5} if size <= 12 else {}
        actions |= {"again": 2, "at_times": 1, "data_dependent": 0.15}
        actions |= {"block": 4} if depth and channels <= 32 else {}
        getattr(self, self.draw.choices(list(actions), list(actions.values()))[0])()

    # -- layers --------------------------------------------------------------------------------------------------------

    def layers(self):
        """A conv with its norm and activation, in one of the usual orders."""
        order = self.draw.choice(["cna", "cna", "cna", "nac", "can", "ca", "cn", "c"])
        for one in order:
            {"c": self.some_conv, "n": self.normalise, "a": self.activate}[one]()

    def some_conv(self):
        channels = self.shape[0]
        out = self.draw.choice(
            [
                channels,
                channels,
                min(24, channels + 4),
                min(24, 2 * channels),
                max(4, channels // 2),
            ]
        )
        kind = self.draw.choice(
            [
                "plain",
                "plain",
                "plain",
                "depthwise",
                "grouped",
                "dilated",
                "strided",
                "point",
                "bare",
            ]
        )
        if kind == "depthwise":
            self.conv(
                channels * self.draw.choice([1, 1, 2]) if channels <= 16 else channels,
                groups=channels,
            )
        elif kind == "grouped" and channels % 2 == 0:
            self.conv(out + out % 2, groups=2)
        elif kind == "dilated":
            self.conv(out, dilation=2)
        elif kind == "strided" and self.shape[1] >= 8:
            self.conv(out, stride=2)
        elif kind == "point":
            self.conv(out, kernel=1)
        else:
            self.conv(out, bare=kind == "bare")

    def conv(self, out, *, kernel=None, stride=1, groups=1, dilation=1, bare=False):
        channels, size, _ = self.shape
        kernel = kernel or self.draw.choice([3, 3, 3, 5] if channels * out <= 128 else [3])
        padding = dilation * (kernel // 2)
        shape = (out, *[(size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1] * 2)
        bias = self.chance(0.5)
        names = {
            "depthwise": groups == channels > 1,
            "grouped": 1 < groups < channels,
            "dilated": dilation > 1,
            "strided": stride > 1,
        }
        self.has(
            *(name for name, is_so in names.items() if is_so), *(["bare conv"] if bare else [])
        )
        if not bare:
            options = {
                "stride": stride,
                "padding": padding,
                "dilation": dilation,
                "groups": groups,
                "bias": bias,
            }
            return self.part(nn.Conv2d(channels, out, kernel, **options), shape=shape)
        name = self.parameter("kernel", out, channels // groups, kernel, kernel)
        if bias:
            self.program.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(out)))
        return self.step(
            "conv2d",
            part=name,
            shape=shape,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
        )

    def normalise(self):
        channels = self.shape[0]
        kind = (
            self.maker.norm if self.chance(0.8) else self.draw.choice(["batch", "layer", "group"])
        )
        self.has(f"{kind} norm")
        if kind == "batch":
            self.part(nn.BatchNorm2d(channels))
        elif kind == "layer":
            self.part(ChannelsLastNorm(channels))
        elif kind == "group":
            self.part(nn.GroupNorm(2 if channels % 2 == 0 else 1, channels))

    def grow(self):
        channels, size, _ = self.shape
        way = self.draw.choice(["two", "three", "bare", "nearest", "bilinear"])
        shape = (channels, 2 * size, 2 * size)
        if way in ("nearest", "bilinear"):
            self.has("interpolated")
            self.step("interpolate", scale_factor=2.0, mode=way, shape=shape)
            return
        self.has("transposed")
        if way == "two":
            groups = 2 if channels % 2 == 0 and self.chance(0.4) else 1
            self.part(
                nn.ConvTranspose2d(channels, channels, 2, stride=2, groups=groups), shape=shape
            )
        elif way == "three":
            self.part(
                nn.ConvTranspose2d(
                    channels, channels, 3, stride=2, padding=1, output_padding=1, bias=False
                ),
                shape=shape,
            )
        else:
            self.has("bare transposed")
            self.step(
                "conv_transpose2d",
                part=self.parameter("kernel", channels, channels, 2, 2),
                stride=2,
                shape=shape,
            )
        self.normalise()
        self.activate()

    def line(self):
        """A 1d conv: over the pixels in their order, or over the channels' means."""
        self.has("1d")
        channels, height, width = self.shape
        if self.chance(0.5):
            self.part(ChannelAttention())
            return
        before = self.now
        self.step(".flatten", shape=(channels, height * width))
        if self.chance(0.6):
            self.part(
                nn.Conv1d(channels, channels, 3, padding=1, groups=self.draw.choice([1, channels]))
            )
        else:
            self.has("bare 1d")
            self.step("conv1d", part=self.parameter("kernel", channels, channels, 3), padding=1)
        self.activate()
        self.step("unflatten", sizes=(height, width), shape=(channels, height, width))
        self.add(before)

    def pool(self):
        channels, size, _ = self.shape
        half = (channels, size // 2, size // 2)
        way = self.draw.choice(
            [
                "max",
                "F.max",
                "avg",
                "F.avg",
                "indices",
                "overlapping",
                "adaptive",
                "F.adaptive",
                "F.adaptive max",
            ]
        )
        self.has(
            "max pool" if "max" in way or way in ("indices", "overlapping") else "average pool"
        )
        self.has("pool function" if "F." in way or way == "indices" else "pool module")
        if "adaptive" in way:
            self.has("adaptive pool")
        if way == "max":
            self.part(nn.MaxPool2d(2), shape=half)
        elif way == "overlapping":
            self.part(nn.MaxPool2d(3, 2, 1), shape=(channels, *[(size - 1) // 2 + 1] * 2))
        elif way == "avg":
            self.part(nn.AvgPool2d(2), shape=half)
        elif way == "indices":
            self.step("F.max_pool2d_indices", shape=half)
        elif way == "adaptive":
            self.part(nn.AdaptiveAvgPool2d(4), shape=(channels, 4, 4))
        elif way == "F.adaptive":
            self.step("F.adaptive_avg_pool2d", output_size=5, shape=(channels, 5, 5))
        elif way == "F.adaptive max":
            self.step("F.adaptive_max_pool2d", output_size=4, shape=(channels, 4, 4))
        else:
            self.step(f"{way}_pool2d", kernel_size=2, shape=half)

    # -- edges ---------------------------------------------------------------------------------------------------------

    def earlier(self):
        images = [
            name
            for name, shape in self.shapes.items()
            if len(shape) == 3 and name not in (self.now, "x")
        ]
        fresh = [name for name in images if name in self.unread]
        return self.draw.choice(fresh or images) if images else None

    def align(self, name, shape):
        """Another value, brought to this shape."""
        before = self.now
        self.now = name
        if self.shape[1:] != shape[1:]:
            self.step(
                "F.adaptive_avg_pool2d", output_size=shape[1], shape=(self.shape[0], *shape[1:])
            )
        if self.shape[0] != shape[0]:
            self.conv(shape[0], kernel=1)
            if self.chance(0.5):
                self.normalise()
        aligned, self.now = self.now, before
        return aligned

    def add(self, other):
        ways = ["add", "torch.add", ".add", "iadd", ".add_"]
        way = self.draw.choice(ways)
        self.has("skip")
        if way in ("iadd", ".add_"):
            self.has("in place")
        self.step(way, self.now, other)

    def skip(self):
        other = self.earlier()
        if other is not None:
            self.add(self.align(other, self.shape))
            if self.chance(0.6):
                self.activate()

    def join(self):
        other = self.earlier()
        if other is not None and self.shape[0] + self.shapes[other][0] <= 48:
            self.has("concatenation")
            channels, *size = self.shape
            before = self.now
            self.now = other
            if self.shape[1:] != tuple(size):
                self.step(
                    "F.adaptive_avg_pool2d", output_size=size[0], shape=(self.shape[0], *size)
                )
            other, self.now = self.now, before
            self.step(
                "cat", self.now, other, dim=1, shape=(channels + self.shapes[other][0], *size)
            )
            if self.chance(0.7):
                self.conv(min(16, self.shape[0]), kernel=1)

    def split(self):
        channels, *size = self.shape
        if channels % 2:
            return
        self.has("split")
        half = (channels // 2, *size)
        pieces = self.step("chunk", chunks=2, dim=1, shape=())
        self.unread.discard(pieces)
        kept = self.step("item", pieces, index=0, shape=half)
        self.step("item", pieces, index=1, shape=half)
        self.some_conv()  # a view of several can't be changed in place
        self.layers()
        changed = self.align(self.now, (self.shape[0], *size))
        self.step("cat", kept, changed, dim=1, shape=(half[0] + self.shapes[changed][0], *size))
        if self.chance(0.5) and self.shape[0] % 2 == 0:
            self.shuffle()

    def shuffle(self):
        groups = next((groups for groups in (4, 2, 3) if self.shape[0] % groups == 0), None)
        if groups:
            self.has("channel shuffle")
            self.step("shuffle", groups=groups)

    def gate(self):
        self.has("squeeze-excite")
        way = self.draw.choice(["module", "function", "mean", "inplace"])
        if way == "inplace":
            self.has("in place")
        self.part(SqueezeExcite(self.shape[0], way))

    def pad(self):
        self.has("padded")
        channels, size, _ = self.shape
        self.step("pad", pad=(1, 1, 1, 1), shape=(channels, size + 2, size + 2))
        self.conv(channels, kernel=1)

    def again(self):
        """A layer, or a whole block, that was called before."""
        kinds = (nn.Conv2d, Program)
        steps = [
            step
            for step in self.program.steps
            if step.kind == "part" and isinstance(self.program.parts[step.part], kinds)
        ]
        fits = [
            step.part
            for step in steps
            if self.shapes[step.inputs[0]] == self.shapes[step.output] == self.shape
        ]
        if fits:
            self.has("shared module")
            self.part(None, name=self.draw.choice(fits))
            self.activate()
        elif self.chance(0.5):
            convs = [
                part
                for part in self.program.parts.values()
                if isinstance(part, nn.Conv2d) and part.in_channels == self.shape[0]
            ]
            if convs:
                one = self.draw.choice(convs)
                self.has("tied weights")
                twin = nn.Conv2d(
                    one.in_channels,
                    one.out_channels,
                    one.kernel_size,
                    padding="same",
                    dilation=one.dilation,
                    groups=one.groups,
                )
                self.maker.tied.append((twin, one))
                self.part(twin, shape=(one.out_channels, *self.shape[1:]))
                self.activate()

    def at_times(self):
        """Something that runs only in `train()`, or only in `eval()`."""
        self.has("train/eval branch")
        when = self.draw.choice(["train", "eval"])
        channels = self.shape[0]
        self.part(
            nn.Conv2d(channels, channels, 3, padding=1, groups=self.draw.choice([1, channels])),
            when=when,
        )

    def data_dependent(self):
        self.has("data-dependent branch")
        self.step("data_dependent")

    def block(self):
        """A program of its own: a chain, a residual block or a bottleneck; at times called twice, or run as a Sequential."""
        channels, size, _ = self.shape
        inner = _Image(self.maker, self.shape)
        for _ in range(self.draw.randint(1, 3)):
            inner.anything(depth=0)
        inner.merge_unread()
        if self.chance(0.6):
            inner.add(inner.align("x", inner.shape))
            if self.chance(0.5):
                inner.activate()
        if not inner.program.steps:
            return
        self.has("block")
        other = self.earlier()
        if other is not None and self.chance(0.15):
            self.has("optional argument given")
            self.part(inner.program, self.now, self.align(other, self.shape), shape=inner.shape)
        else:
            self.part(inner.program, shape=inner.shape)
        if inner.shape == (channels, size, size) and self.chance(0.3):
            self.has("shared module")
            self.part(None, name=self.program.steps[-1].part)

    def merge_unread(self):
        """So that no value is computed in vain."""
        for name in sorted(self.unread - {self.now}, key=lambda one: int(one[1:])):
            if len(self.shapes[name]) == 3:
                self.add(self.align(name, self.shape))

    def heads(self):
        features, heads = self.now, []
        for _ in range(self.draw.choice([1, 1, 1, 2, 3])):
            self.now = features
            if self.chance(0.3):
                self.dropout()
            channels, size, _ = self.shape
            way = self.draw.choice(["module", "function", "mean", "unpooled", "conv"])
            if way == "unpooled" and channels * size * size <= 2048:
                self.has("unpooled head")
                self.step("flatten", shape=(channels * size * size,))
            elif way == "conv":
                self.has("conv head")
                self.conv(CLASSES, kernel=1)
                heads.append(self.step("mean", dim=(2, 3), shape=(CLASSES,)))
                continue
            elif way == "module":
                self.part(nn.AdaptiveAvgPool2d(1), shape=(channels, 1, 1))
                self.step("flatten", shape=(channels,))
            elif way == "function":
                self.step("F.adaptive_avg_pool2d", output_size=1, shape=(channels, 1, 1))
                self.step("flatten", shape=(channels,))
            else:
                self.step("mean", dim=(2, 3), shape=(channels,))
            heads.append(self.head(self.shape[0]))
        self.answer(heads)


class _Tokens(_Build):
    """Programs over tokens: shapes are (tokens, width)."""

    def __init__(self, maker, width):
        super().__init__(maker, ())
        self.width, self.side, self.has_class_token = width, None, False

    @property
    def dropped(self):
        if self.chance(0.3):
            self.has("dropout")
            return 0.1
        return 0.0

    def embed(self):
        """Patches of an image, or words; with what marks their position. Returns what makes inputs of it."""
        width, way = self.width, self.draw.choice(["conv", "conv", "unfold", "words"])
        if way == "words":
            self.has("token embedding")
            tokens = self.draw.choice([6, 10])
            self.part(nn.Embedding(20, width), shape=(tokens, width))
            make_inputs = lambda generator: (torch.randint(20, (4, tokens), generator=generator),)  # noqa: E731
        else:
            size, patch = self.draw.choice([(16, 4), (16, 8), (32, 8)])
            self.side = size // patch
            if way == "conv":
                self.part(nn.Conv2d(3, width, patch, patch), shape=(width, self.side, self.side))
                self.step(".flatten", shape=(width, self.side**2))
            else:
                self.part(nn.Unfold(patch, stride=patch), shape=(3 * patch**2, self.side**2))
            self.step(".transpose", shape=(self.side**2, self.shape[0]))
            if way == "unfold":
                self.has("patches by unfold")
                self.part(nn.Linear(3 * patch**2, width), shape=(self.side**2, width))
            make_inputs = lambda generator: (torch.randn(4, 3, size, size, generator=generator),)  # noqa: E731
        if self.chance(0.5):
            self.has("class token")
            self.has_class_token = True
            self.step(
                "prepend",
                part=self.parameter("token", 1, 1, width),
                shape=(self.shape[0] + 1, width),
            )
        if self.chance(0.8):
            self.has("position parameter")
            self.step("add_parameter", part=self.parameter("position", 1, *self.shape))
        return make_inputs

    def normalise(self):
        kind = self.maker.norm if self.chance(0.8) else self.draw.choice(["batch", "layer", "none"])
        if kind == "batch":
            self.has("batch norm")
            tokens, width = self.shape
            self.step(".transpose", shape=(width, tokens))
            self.part(nn.BatchNorm1d(width))
            self.step(".transpose", shape=(tokens, width))
        elif kind in ("layer", "group"):
            self.has("layer norm")
            self.part(nn.LayerNorm(self.width))

    def block(self):
        """Attention and an MLP, with the norm before or behind them; at times torch's own, at times called twice."""
        if self.chance(0.15):
            self.has("torch's encoder layer")
            self.part(
                nn.TransformerEncoderLayer(
                    self.width,
                    2,
                    2 * self.width,
                    self.dropped,
                    batch_first=True,
                    norm_first=self.chance(0.5),
                )
            )
            return
        inner = _Tokens(self.maker, self.width)
        inner.shapes["x"], inner.side = self.shape, None if self.has_class_token else self.side
        first = self.chance(0.7)
        for branch in self.draw.choice(
            [
                (inner.attend, inner.mlp),
                (inner.mix, inner.mlp),
                (inner.attend,),
                (inner.attend, inner.mix),
            ]
        ):
            before = inner.now
            if first:
                inner.normalise()
            branch()
            if self.chance(0.3):
                self.has("layer scale")
                inner.step("scale_parameter", part=inner.parameter("gamma", self.width))
            if self.chance(0.2):
                inner.dropout()
            self.has("skip")
            way = self.draw.choice(["add", "torch.add", "iadd"])
            if way == "iadd":
                self.has("in place")
            inner.step(way, inner.now, before)
            if not first:
                inner.normalise()
        self.has("block")
        self.part(inner.program)
        if self.chance(0.25):
            self.has("shared module")
            self.part(None, name=self.program.steps[-1].part)

    def attend(self):
        heads = self.draw.choice([1, 2, 4])
        way = self.draw.choice(["torch", "torch", "qkv", "separate", "fused"])
        if way == "torch":
            crossed = self.chance(0.25)
            self.has("MultiheadAttention", *(["attention of one token"] if crossed else []))
            self.part(TorchAttention(self.width, heads, self.chance(0.6), crossed, self.dropped))
        else:
            self.has("attention by hand")
            self.part(HandAttention(self.width, heads, way, self.dropped))

    def mlp(self):
        gated = self.chance(0.3)
        self.has("mlp", *(["gated mlp"] if gated else []))
        activation = self.maker.activation_module(
            may_overwrite=not gated
        )  # a view of several can't be changed in place
        self.part(
            Mlp(
                self.width,
                self.draw.choice([self.width, 2 * self.width]),
                activation,
                gated,
                self.dropped,
            )
        )

    def mix(self):
        if self.side is not None and self.chance(0.6):
            self.has("depthwise")
            self.part(TokenConv(self.width, self.side))
        else:
            self.has("token mixer")
            self.part(TokenMixer(self.shape[0]))

    def heads(self):
        if self.chance(0.7):
            self.normalise()
        features, heads = self.now, []
        for _ in range(self.draw.choice([1, 1, 2])):
            self.now = features
            if self.chance(0.4):
                self.step("first", shape=(self.width,))
            else:
                self.step("mean", dim=1, shape=(self.width,))
            if self.chance(0.3):
                self.dropout()
            heads.append(self.head(self.width))
        self.answer(heads)
