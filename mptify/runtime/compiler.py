"""From a ticket model to a packed program: the same graph, with kernels for its binary layers."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from mptify.errors import BadConfig, MptifyError, shown
from mptify.nn.layers import Ticketed, WeightState
from mptify.nn.quantizers import Sign, UniformQuantizer
from mptify.runtime.calibration import Batches, check_activation_bits, round_inputs
from mptify.runtime.fusion import Fusion, Pattern
from mptify.runtime.kernel import Kernel, NativeKernel, TorchKernel
from mptify.runtime.kernels.concat import Concat
from mptify.runtime.kernels.flatten import Flatten
from mptify.runtime.kernels.max_pool import MaxPool
from mptify.runtime.kernels.number_average import NumberAverage
from mptify.runtime.kernels.number_max_pool import NumberMaxPool
from mptify.runtime.kernels.pack import Pack
from mptify.runtime.kernels.quantize import Dequantize, Quantize
from mptify.runtime.kernels.unpack import Unpack
from mptify.runtime.lane_fusion import LanePattern, Levels, lane_patterns
from mptify.runtime.library import library
from mptify.runtime.nodes import (
    is_concat,
    is_flatten,
    is_global_average,
    is_identity,
    is_plain_pool,
    module_name,
    module_of,
    shape_of,
)
from mptify.runtime.partition import LAYOUT, partition
from mptify.runtime.selection import select_kernel, select_lane_kernel
from mptify.runtime.subgraphs import pack_subgraphs, propagate_shapes, with_graphs
from mptify.runtime.values import LAYOUTS
from mptify.surgery.hooks import copy_hooks_, is_hooked

__all__ = ["compile_graph", "pack", "packed_layers"]


def pack(
    model: nn.Module,
    example: Any = None,
    *,
    activation_bits: int | None = None,
    calibrate: Any = None,
) -> nn.Module:
    """Make a packed program from a ticket model: for inference on a CPU.

    The program takes and returns ordinary tensors. Layers of few-bit inputs compute on integers and
    equal the float model's; layers of 32-bit inputs agree to rounding. Where torch is estimated to
    be faster, it computes the layer. If only parts of a network have a graph, as in detectors,
    those parts are packed.

    Args:
        model: A ticket model in `eval()`.
        example: An input of the usual size, or a tuple of all arguments of the model. Other sizes
            work too. Networks of timm and torchvision need none, and neither do calibrated ones.
        activation_bits: 8 lets the layers of a finished 1/32 ticket round their inputs to 8 bits.
            The model stays as it is.
        calibrate: The images that the ranges of these inputs are taken from: a tensor, or an
            iterable of batches. A batch is a tensor of images, or a tuple whose first element is
            one, followed by labels if accuracy should be measured. In place of the tensor, a batch
            may have what the model takes: a list, or a tuple of all arguments.

    Returns:
        The program; or the model itself, with a warning, if mptify was installed without a C++
        compiler. After calibration its attribute `calibration`, a
        [`Calibration`][mptify.runtime.calibration.Calibration], says what 8-bit inputs cost.

    Raises:
        BadConfig: `activation_bits` is not 8 or None, or the ticket is not one of 1/32 bits.
        MptifyError: The model is not a ticket model in `eval()` on a CPU, or can't take the
            example or the images.

    Example:
        program = mptify.pack(model, activation_bits=8, calibrate=images)
        print(program.calibration)
    """
    if not isinstance(model, nn.Module):
        raise MptifyError(f"mptify.pack takes a ticket model, not {shown(model)}.")
    if model.training:
        raise MptifyError("mptify.pack takes a model in eval(); call model.eval() first.")
    layers = [module for module in model.modules() if isinstance(module, Ticketed)]
    if not layers:
        raise MptifyError("mptify.pack takes a ticket model; mptify.transform(model) makes one.")
    if activation_bits is not None:
        _require_on_cpu(model, ())
        check_activation_bits(model, activation_bits)
        batches = Batches(calibrate)
        rounded, calibration = round_inputs(model, batches)
        program: Any = pack(rounded, batches.example() if example is None else example)
        program.calibration = calibration
        return program
    if calibrate is not None:
        raise BadConfig("calibrate=... is for activation_bits=8; pass both, or neither.")
    arguments = _arguments(model, example)
    given = [one for one in tree_leaves(arguments) if isinstance(one, Tensor)]
    _require_on_cpu(model, given)
    if library is None:
        warnings.warn(
            "mptify was installed without a C++ compiler: this model runs as a float32 network.",
            stacklevel=2,
        )
        return model
    with torch.no_grad():
        model = with_graphs(model)
        if not isinstance(model, fx.GraphModule):
            return _with_hooks_of(model, pack_subgraphs(model, arguments, compile_graph))
        try:
            propagate_shapes(model, arguments)
        except Exception:  # whatever torch's operations make of the example
            sizes = " and ".join("×".join(map(str, one.shape)) for one in given) or shown(example)
            raise MptifyError(
                f"The network can't take an input of {sizes}; pass one that it can: "
                "mptify.pack(model, example)."
            ) from None
        return _with_hooks_of(model, compile_graph(model))


def packed_layers(program: nn.Module) -> list[Any]:
    """The kernels with weights: they have `weight_count`, `survivor_count` and `weight_bytes`."""
    return [
        module
        for module in program.modules()
        if isinstance(module, Kernel) and "weight_count" in module.SETTINGS
    ]


def compile_graph(
    model: fx.GraphModule, kernels: Mapping[str, Kernel] | None = None
) -> fx.GraphModule:
    """The program of a model whose nodes know their shapes.

    Args:
        model: A ticket model.
        kernels: Kernels by name, from a file. They replace the layers, and no others do.

    Raises:
        KeyError: A kernel does not suit the layer that it would replace.
    """
    program = _Compiler(model, kernels).run()
    for name, value in vars(model).items():  # num_classes and the like, which other code reads
        if not name.startswith("_") and not callable(value) and not hasattr(program, name):
            setattr(program, name, value)
            preserved = program.meta.setdefault("_user_preserved_attributes", {})
            preserved[name] = value  # fx copies these with the module
    return program


def _with_hooks_of(model: nn.Module, program: nn.Module) -> nn.Module:
    """The program with the model's hooks, unless they are on modules that kernels replaced."""
    copy_hooks_(model, program)
    kept = dict(program.named_modules())
    for name, module in model.named_modules():
        if is_hooked(module) and not (name in kept and is_hooked(kept[name])):
            raise MptifyError(
                f"{name} has hooks, which a packed program would not call; remove them first."
            )
    return program


def _arguments(model: nn.Module, example: Any) -> tuple[Any, ...]:
    if isinstance(example, tuple):
        return example
    if isinstance(example, Tensor):
        return (example[:1] if isinstance(model, fx.GraphModule) else example,)
    return (_usual_input(model) if example is None else example,)


def _require_on_cpu(model: nn.Module, given: Iterable[Tensor]) -> None:
    if any(tensor.device.type != "cpu" for tensor in (*_state_of(model), *given)):
        raise MptifyError("Packed programs run on CPUs; call model.cpu() first.")


def _usual_input(model: nn.Module) -> Tensor:
    config: Any = getattr(model, "pretrained_cfg", None)
    if hasattr(config, "get") and config.get("input_size"):
        return torch.zeros(1, *config.get("input_size"))
    if getattr(model, "original_module", type(model).__module__).startswith("torchvision."):
        return torch.zeros(1, 3, 224, 224)
    raise MptifyError(
        "This network does not say which input it takes; pass one of the usual size: "
        "mptify.pack(model, example)."
    )


def _state_of(model: nn.Module) -> Iterator[Tensor]:
    """All tensors but the weights of layers that fetch them."""
    for module in model.modules():
        if not (isinstance(module, Ticketed) and module.state is WeightState.LAZY):
            tensors = (*module._parameters.values(), *module._buffers.values())
            yield from (tensor for tensor in tensors if tensor is not None)


class _Compiler:
    """Builds the program node by node. A value can exist as numbers, as planes, or as both."""

    def __init__(self, model: fx.GraphModule, given: Mapping[str, Kernel] | None):
        self.model, self.given = model, given
        self.modules = dict(model.named_modules())
        self.fusion = Fusion(model)
        self.on_lanes = lane_patterns(model, given)
        self.binary = self.fusion.binary
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.numbers: dict[fx.Node, fx.Node] = {}
        self.planes: dict[tuple[fx.Node, str], fx.Node] = {}
        self.before_sign: dict[fx.Node, fx.Node] = {}  # what a sign, not taken yet, is taken of
        self.levels: dict[fx.Node, tuple[fx.Node, Levels]] = {}
        self.of_tokens: dict[fx.Node, bool] = {}  # of what kernels on lanes make: tokens or images?
        self.averages: set[fx.Node] = set()  # means of channels, as vectors
        self.level_nodes: dict[fx.Node, bool] = {}  # quantizers that make levels; if of tokens

    def run(self) -> fx.GraphModule:
        patterns = self.fusion.patterns.values()
        makers = {node: self.lane_kernel(one) for node, one in self.on_lanes.items()}
        self.on_lanes = {node: self.on_lanes[node] for node, make in makers.items() if make}
        self.of_layer = {one.node: one for one in self.on_lanes.values()}
        self.plan_levels()
        fused = {node for pattern in patterns for node in pattern.nodes}
        fused |= {node for one in self.on_lanes.values() for node in one.nodes[:-1]}
        for node in self.model.graph.nodes:
            if node in self.on_lanes:
                self.place_on_lanes(node, self.on_lanes[node], makers[node])
            elif node not in fused:
                self.convert(node)
        name = f"Packed{type(self.model).__name__}"
        return partition(fx.GraphModule(self.root, self.graph, name))

    # -- lanes ---------------------------------------------------------------------------------

    def plan_levels(self) -> None:
        """Decide which layers make levels: those whose result is only read as the same levels."""
        readers = self.of_layer
        for result, pattern in self.on_lanes.items():
            read = {self.levels_read(user, result, readers) for user in result.users}
            if len(read) == 1 and not pattern.is_vector:
                pattern.rounding = read.pop()
        quantizers = [
            node
            for node in self.model.graph.nodes
            if isinstance(module_of(node, self.modules), UniformQuantizer)
        ]
        for node in quantizers:
            read_as = self.read_on_lanes(node)
            if len(read_as) == 1:
                self.level_nodes[node] = read_as.pop()

    def levels_read(
        self, user: fx.Node, result: fx.Node, readers: dict[fx.Node, LanePattern]
    ) -> Levels | None:
        """The levels as which a node reads a value; None if it reads numbers."""
        module = module_of(user, self.modules)
        if isinstance(module, UniformQuantizer):
            return Levels.of(module)
        pattern = readers.get(user)
        if pattern is None or pattern.reads_numbers or pattern.source is not result:
            return None
        return pattern.levels

    def read_on_lanes(self, node: fx.Node) -> set[bool]:
        """How layers on lanes read a value, behind pools and identities or directly: as tokens?"""
        found: set[bool] = set()
        for user in node.users:
            module, reader = module_of(user, self.modules), self.of_layer.get(user)
            if reader is not None and not reader.reads_numbers:
                found.add(reader.tokens)
            elif self.is_averaged(user):
                found.add(False)
            elif is_plain_pool(module) or is_identity(module):
                found |= self.read_on_lanes(user)
        return found

    def lane_kernel(self, pattern: LanePattern) -> Callable[[], Kernel] | None:
        """Makes the kernel for a pattern, once its levels are known; None if torch computes it."""
        if pattern.kernel is not None:
            return lambda: self.given_lane_kernel(pattern)
        candidate = select_lane_kernel(pattern)
        return None if candidate is None else candidate.make

    def given_lane_kernel(self, pattern: LanePattern) -> Kernel:
        """The kernel from a file for a pattern."""
        kernel = pattern.kernel
        assert kernel is not None
        if not (kernel.ON_LANES and kernel.suits(pattern)):
            raise _unsuitable(module_name(pattern.node), kernel)
        return kernel

    def place_on_lanes(self, node: fx.Node, pattern: LanePattern, make: Any) -> None:
        source, levels, tokens = pattern.source, pattern.levels, pattern.tokens
        if pattern.is_vector:
            inputs = [self.numbers_of(source)]
        elif levels is None:
            inputs = [self.numbers_as(source, tokens)]
        else:
            inputs = [self.levels_of(source, levels, tokens)]
        if pattern.other is not None and self.has_levels(pattern.other, tokens):
            made, pattern.other_levels = self.levels[pattern.other]
            inputs.append(made)
        elif pattern.other is not None:
            inputs.append(self.numbers_as(pattern.other, tokens))
        made = self.call(pattern.node, make(), *inputs, levels=pattern.rounding)
        if pattern.pool is not None:
            falling = pattern.epilogue["alpha"] < 0
            pool = NumberMaxPool.of(pattern.pool, falling if bool(falling.any()) else None)
            made = self.call(pattern.node, pool, made, name="pool", levels=pattern.rounding)
        if not pattern.is_vector:
            self.of_tokens[made] = tokens
        if pattern.rounding is None:
            self.numbers[node] = made
        else:
            self.levels[node] = made, pattern.rounding

    def levels_of(self, node: fx.Node, levels: Levels, tokens: bool) -> fx.Node:
        """A value as levels, of tokens or of images."""
        if self.has_levels(node, tokens) and self.levels[node][1] == levels:
            return self.levels[node][0]
        kernel = Quantize(*levels[:3], tokens=tokens)
        name = f"levels_{len(self.graph.nodes)}"
        numbers = self.numbers_as(node, tokens)
        made = self.call(node, kernel, numbers, name=name, levels=levels)
        self.of_tokens[made] = tokens
        return made

    def has_levels(self, node: fx.Node, tokens: bool) -> bool:
        """Whether a value has levels that layers on tokens, or on images, can read."""
        return node in self.levels and self.of_tokens.get(self.levels[node][0], tokens) == tokens

    def numbers_as(self, node: fx.Node, tokens: bool) -> fx.Node:
        """A value as numbers for a kernel on tokens, or on images.

        A linear layer may read an image along its rows. Then the image becomes a tensor first,
        because its planes are those of channels.
        """
        numbers = self.numbers_of(node)
        if self.of_tokens.get(numbers, tokens) == tokens:
            return numbers
        name = f"tensor_{len(self.graph.nodes)}"
        return self.call(node, nn.Identity(), numbers, name=name)

    def is_averaged(self, node: fx.Node) -> bool:
        """Whether a node averages what layers on vectors read, and nothing else does."""
        if not is_global_average(node, module_of(node, self.modules)):
            return False
        users = list(node.users)
        while len(users) == 1 and self.keeps_averages(users[0]):
            users = list(users[0].users)
        found = [self.of_layer.get(user) for user in users]
        return bool(found) and all(one and one.is_vector and one.levels is None for one in found)

    def keeps_averages(self, node: fx.Node) -> bool:
        module = module_of(node, self.modules)
        return is_identity(module) or is_flatten(node, module)

    def convert_averages(self, node: fx.Node) -> bool:
        """Whether a node was converted to the mean of each channel, as one vector."""
        source: Any = node.args[0] if node.args else None
        if source in self.averages and self.keeps_averages(node):
            self.averages.add(node)
            self.numbers[node] = self.numbers[source]
            return True
        if not self.is_averaged(node):
            return False
        if self.has_levels(source, tokens=False):
            made, levels = self.levels[source]
            self.numbers[node] = self.call(node, NumberAverage(levels.step), made)
        else:
            numbers = self.numbers_as(source, tokens=False)
            self.numbers[node] = self.call(node, NumberAverage(), numbers)
        self.averages.add(node)
        return True

    def convert_levels(self, node: fx.Node, module: Any) -> bool:
        """Whether a quantizer, or what follows one, was converted to an operation on levels."""
        source: Any = node.args[0] if node.args else None
        if node in self.level_nodes:
            levels = Levels.of(module)
            self.levels[node] = self.levels_of(source, levels, self.level_nodes[node]), levels
        elif source not in self.levels:
            return False
        elif is_identity(module) or self.rounds_again(source, module):
            self.levels[node] = self.levels[source]
        elif is_plain_pool(module) and len(shape_of(node)) == 4:
            _, levels = self.levels[source]
            levels_read = self.levels_of(source, levels, tokens=False)
            made = self.call(node, NumberMaxPool.of(module), levels_read, levels=levels)
            self.of_tokens[made] = False
            self.levels[node] = made, levels
        else:
            return False
        return True

    def rounds_again(self, source: fx.Node, module: Any) -> bool:
        """Whether a module rounds a value to the levels that it has."""
        return isinstance(module, UniformQuantizer) and self.levels[source][1] == Levels.of(module)

    def convert(self, node: fx.Node) -> None:
        module = module_of(node, self.modules)
        source: Any = node.args[0] if node.args else None
        pattern = self.fusion.patterns.get(node) or self.fusion.match_layer(node)
        if pattern is not None and self.place_kernel(node, pattern):
            return
        for one in pattern.nodes if pattern is not None else ():  # each node by itself
            self.convert(one)
        if self.on_lanes and (self.convert_averages(node) or self.convert_levels(node, module)):
            return
        if isinstance(module, Sign):
            self.before_sign[node] = self.numbers_of(source)
        elif self.on_lanes and is_plain_pool(module) and len(shape_of(node)) == 4:
            numbers = self.numbers_as(source, tokens=False)
            made = self.call(node, NumberMaxPool.of(module), numbers)
            self.of_tokens[made] = False
            self.numbers[node] = made
        elif node not in self.binary:
            if node.op in ("call_module", "get_attr"):
                value = operator.attrgetter(str(node.target))(self.model)
                _set_submodule(self.root, str(node.target), value)
            self.numbers[node] = self.graph.node_copy(node, self.numbers_of)
        elif is_identity(module):
            self.alias(source, node)
        else:
            self.convert_binary(node, module, source)

    def convert_binary(self, node: fx.Node, module: Any, source: Any) -> None:
        """A max-pool, a concatenation or a flattening of signs."""
        kernel: NativeKernel
        if is_concat(node):
            kernel, inputs, layout = Concat(), source, "channels"
        elif is_plain_pool(module):
            kernel, inputs, layout = MaxPool.of(module), [source], "channels"
        else:
            kernel, inputs, layout = Flatten(), [source], "vectors"
        planes = [self.planes_of(one, "channels") for one in inputs]
        self.planes[node, layout] = self.call(node, kernel, *planes, layout=layout)

    # -- kernels -------------------------------------------------------------------------------

    def place_kernel(self, node: fx.Node, pattern: Pattern) -> bool:
        """Whether there is a kernel for a pattern; `node` is its result."""
        layer = pattern.branch.node
        name = module_name(layer) if pattern.makes_signs else f"{layer.name}_sums"
        found = select_kernel(pattern) if self.given is None else self.given_kernel(name, pattern)
        if found is None:
            return False
        kernel, pool = found
        layout, suffix = pattern.branch.layout, "" if pattern.makes_signs else "sums"
        in_torch = isinstance(kernel, TorchKernel)
        makes_planes = pattern.makes_signs and not in_torch
        value = self.call(
            layer,
            kernel,
            *self.inputs_of(pattern, in_torch),
            name=suffix,
            layout=layout if makes_planes else "",
        )
        if not pattern.makes_signs:
            self.numbers[node] = value
            return True
        if in_torch:
            value = self.call(layer, Pack(layout), value, name="pack", layout=layout)
        if pool is not None:
            value = self.call(layer, pool, value, name="pool", layout=layout)
        self.planes[node, layout] = value
        return True

    def inputs_of(self, pattern: Pattern, in_torch: bool) -> list[fx.Node]:
        """What a kernel reads: planes of signs, or numbers; a kernel in Python always numbers."""
        layout = "channels" if pattern.averages else pattern.branch.layout
        sources = [(pattern.source, layout, pattern.reads_signs)]
        if pattern.other is not None:
            other = pattern.other
            sources.append((other.source, other.layout, pattern.other_reads_signs))
        if pattern.shortcut is not None:
            sources.append((pattern.shortcut, layout, True))
        return [
            self.planes_of(source, layout) if signs and not in_torch else self.numbers_of(source)
            for source, layout, signs in sources
        ]

    def given_kernel(self, name: str, pattern: Pattern) -> tuple[Kernel, Kernel | None] | None:
        """The kernel of this name from a file, and that of the max-pool behind it."""
        assert self.given is not None
        if name not in self.given:
            return None
        kernel = self.given[name]
        pool = None if pattern.pool is None else self.given[f"{name}_pool"]
        if not kernel.suits(pattern) or not isinstance(pool, (MaxPool, type(None))):
            raise _unsuitable(name, kernel)
        return kernel, pool

    # -- values --------------------------------------------------------------------------------

    def alias(self, source: fx.Node, node: fx.Node) -> None:
        if source in self.before_sign:
            self.before_sign[node] = self.before_sign[source]
        for layout in LAYOUTS:
            if (source, layout) in self.planes:
                self.planes[node, layout] = self.planes[source, layout]

    def planes_of(self, node: fx.Node, layout: str) -> fx.Node:
        if (node, layout) not in self.planes:
            is_open = node in self.before_sign
            numbers = self.before_sign[node] if is_open else self.numbers_of(node)
            packed = self.call(node, Pack(layout), numbers, name=layout, layout=layout)
            self.planes[node, layout] = packed
        return self.planes[node, layout]

    def numbers_of(self, node: Any) -> Any:
        if node not in self.numbers and node in self.before_sign:
            self.numbers[node] = self.call(node, Sign(), self.before_sign[node], name="sign")
        elif node not in self.numbers and node in self.levels:
            made, levels = self.levels[node]
            numbers = self.call(node, Dequantize(levels.step), made, name="numbers")
            self.numbers[node] = numbers
            if made in self.of_tokens:
                self.of_tokens[numbers] = self.of_tokens[made]
        elif node not in self.numbers:
            known = [layout for layout in LAYOUTS if (node, layout) in self.planes]
            planes = self.planes[node, known[0]]
            self.numbers[node] = self.call(node, Unpack(), planes, name="unpack")
        return self.numbers[node]

    def call(
        self,
        node: fx.Node,
        module: nn.Module,
        *args: Any,
        name: str = "",
        layout: str = "",
        levels: Levels | None = None,
    ) -> fx.Node:
        """Call a module; `layout` is that of the planes, or `levels` the levels, that it makes."""
        path = f"{node.name}_{name}" if name else module_name(node)
        self.root.add_module(path, module)
        made = self.graph.call_module(path, args)
        made.name = path
        if layout:
            made.meta[LAYOUT] = layout
        if levels is not None:
            made.meta[LAYOUT] = levels
        return made


def _unsuitable(name: str, kernel: Kernel) -> KeyError:
    return KeyError(f"{name}: a {type(kernel).__name__} can't replace this layer")


def _set_submodule(root: nn.Module, path: str, value: Any) -> None:
    *prefix, name = path.split(".")
    for part in prefix:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        root.register_buffer(name, value)
    else:
        setattr(root, name, value)
