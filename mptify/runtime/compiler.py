"""From a ticket model to a packed program: the same graph, with binary layers on bit planes and the rest as it was."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from mptify.errors import MptifyError, shown
from mptify.nn.layers import Ticketed, WeightState
from mptify.nn.quantizers import Sign
from mptify.runtime.bitsliced import BitslicedConv
from mptify.runtime.chains import LAYOUT, in_chains
from mptify.runtime.joined import JoinedConv
from mptify.runtime.kernels import kernel_for_means, kernel_for_sums, kernels_for
from mptify.runtime.library import library
from mptify.runtime.linear import PopcountLinear
from mptify.runtime.means import MeanLinear
from mptify.runtime.parts import pack_parts, propagate
from mptify.runtime.pixels import PixelConv
from mptify.runtime.planes import LAYOUTS, Concat, Flatten, Kernel, Layer, Pack, Unpack
from mptify.runtime.pooling import Pool
from mptify.runtime.tails import Tail, Tails, is_concat, is_plain_pool, is_through, module_of
from mptify.runtime.windows import WindowConv
from mptify.surgery.hooks import copy_hooks_, is_hooked

__all__ = ["compiled", "pack", "packed_layers"]


def pack(model: nn.Module, example: Any = None) -> nn.Module:
    """A packed program of a 1/1 ticket model on a CPU: takes and returns ordinary tensors, for inference only.

    `example` is an input of the size that it will be used with, or a tuple of all that the model takes; other sizes work too. A network
    of timm's or torchvision's needs none: it is run on an image of the size that it was made for. Of networks that no graph holds as a
    whole, such as detectors, the parts that have one are packed. Where mptify was installed without a C++ compiler, the model itself
    is returned, with a warning.
    """
    if not isinstance(model, nn.Module):
        raise MptifyError(f"A ticket model is needed to pack, not {shown(model)}.")
    if model.training:
        raise MptifyError("A packed program is made from a model in eval(); call model.eval() first.")
    if not any(isinstance(module, Ticketed) and module.scales_output for module in model.modules()):
        raise MptifyError("Packed programs are for 1/1 tickets: what 1/32 tickets gain is size, not speed.")
    arguments = _arguments(model, example)
    given = [one for one in tree_leaves(arguments) if isinstance(one, Tensor)]
    if any(tensor.device.type != "cpu" for tensor in (*_state_of(model), *given)):
        raise MptifyError("Packed programs run on CPUs; call model.cpu() first.")
    if library is None:
        warnings.warn("mptify was installed without a C++ compiler: this model runs as a float32 network.", stacklevel=2)
        return model
    with torch.no_grad():
        if not isinstance(model, fx.GraphModule):
            return _with_hooks_of(model, pack_parts(model, arguments, compiled))
        try:
            propagate(model, arguments)
        except Exception:  # whatever torch's operations make of what they were given
            sizes = " and ".join("×".join(map(str, one.shape)) for one in given) or shown(example)
            raise MptifyError(f"The network can't take an input of {sizes}; pass one that it can: mptify.pack(model, example).") from None
        return _with_hooks_of(model, compiled(model))


def _with_hooks_of(model: nn.Module, program: nn.Module) -> nn.Module:
    """The program, unless hooks of the model wait for modules that it has kernels for."""
    copy_hooks_(model, program)
    kept = dict(program.named_modules())
    for name, module in model.named_modules():
        if is_hooked(module) and not (name in kept and is_hooked(kept[name])):
            raise MptifyError(f"{name} has hooks, which would not be called in a packed program; remove them first.")
    return program


def _arguments(model: nn.Module, example: Any) -> tuple[Any, ...]:
    if isinstance(example, tuple):
        return example
    if isinstance(example, Tensor):
        return (example[:1] if isinstance(model, fx.GraphModule) else example,)
    return (_usual_input(model) if example is None else example,)


def compiled(model: fx.GraphModule, kernels: Mapping[str, Kernel] | None = None) -> fx.GraphModule:
    """The program of a model whose nodes know their shapes; with `kernels`, by name, these and no others take the place of its layers."""
    program = _Compiler(model, kernels).run()
    plain = {name: value for name, value in vars(model).items() if not name.startswith("_") and not callable(value)}
    for name, value in plain.items():  # what other code may read: num_classes and the like
        if not hasattr(program, name):
            setattr(program, name, value)
            program.meta.setdefault("_user_preserved_attributes", {})[name] = value  # else fx would not copy it
    return program


def _usual_input(model: nn.Module) -> Tensor:
    config: Any = getattr(model, "pretrained_cfg", None)
    if hasattr(config, "get") and config.get("input_size"):
        return torch.zeros(1, *config.get("input_size"))
    if getattr(model, "original_module", type(model).__module__).startswith("torchvision."):
        return torch.zeros(1, 3, 224, 224)
    raise MptifyError("Nobody but you knows what this network takes; pass an input of the usual size: mptify.pack(model, example).")


def _state_of(model: nn.Module) -> Iterator[Tensor]:
    """All tensors but the weights of layers that fetch them."""
    for module in model.modules():
        if not (isinstance(module, Ticketed) and module.state is WeightState.LAZY):
            yield from (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)


def packed_layers(program: nn.Module) -> list[Any]:
    """The layers of a program that run on kernels, with their `weight_count`, `survivor_count` and `weight_bytes`."""
    kinds = (BitslicedConv, MeanLinear, PixelConv, PopcountLinear, WindowConv)
    return [module for module in program.modules() if isinstance(module, kinds)]


_READS: dict[str, Any] = {"channels": (BitslicedConv, WindowConv), "tokens": (BitslicedConv, WindowConv), "vectors": PopcountLinear}


class _Compiler:
    def __init__(self, model: fx.GraphModule, given: Mapping[str, Kernel] | None):
        self.model, self.given = model, given
        self.modules = dict(model.named_modules())
        self.tails = Tails(model)
        self.binary = self.tails.binary
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.floats: dict[fx.Node, fx.Node] = {}
        self.planes: dict[tuple[fx.Node, str], fx.Node] = {}
        self.before_sign: dict[fx.Node, fx.Node] = {}  # of signs that are not taken yet: what to take them of

    def run(self) -> fx.GraphModule:
        absorbed = {node for some in (self.tails.of, self.tails.heads) for whole in some.values() for node in whole.nodes}
        for node in self.model.graph.nodes:
            if node not in absorbed:
                self.convert(node)
        return in_chains(fx.GraphModule(self.root, self.graph, f"Packed{type(self.model).__name__}"))

    def convert(self, node: fx.Node) -> None:
        module = module_of(node, self.modules)
        source: Any = node.args[0] if node.args else None
        if isinstance(module, Sign):
            self.take_sign(node, source)
        elif is_through(module) and node in self.binary:
            self.hand_on(source, node)
        elif is_plain_pool(module) and node in self.binary:
            self.planes[node, "channels"] = self.call(node, Pool(module, None), self.planes_of(source, "channels"), layout="channels")
        elif node in self.binary and is_concat(node):
            parts = [self.planes_of(one, "channels") for one in source]
            self.planes[node, "channels"] = self.call(node, Concat(), *parts, layout="channels")
        elif node in self.binary:
            self.planes[node, "vectors"] = self.call(node, Flatten(), self.planes_of(source, "channels"), layout="vectors")
        elif not (self.pack_head(node) if node in self.tails.heads else self.pack_alone(node)):
            if node.op in ("call_module", "get_attr"):
                _put(self.root, str(node.target), operator.attrgetter(str(node.target))(self.model))
            self.floats[node] = self.graph.node_copy(node, self.float_of)

    # -- layers ----------------------------------------------------------------------------------------------------------------

    def take_sign(self, node: fx.Node, source: fx.Node) -> None:
        tail = self.tails.of.get(node)
        if tail is not None and self.pack_tail(node, tail):
            return
        for one in tail.nodes if tail is not None else ():  # as if there were no such tail
            self.convert(one)
        self.before_sign[node] = self.float_of(source)

    def pack_tail(self, sign: fx.Node, tail: Tail) -> bool:
        """Whether there is a kernel for a layer with all that stands between it and the sign."""
        branch, layout = tail.branch, tail.branch.layout
        binary = branch.source in self.binary
        if not binary and (layout != "channels" or tail.other is not None or tail.shortcut is not None):
            return False
        if tail.other is not None and tail.other.source not in self.binary:
            return False
        made = self.kernels_of(_free(branch.node.name), tail.pool is not None, lambda: kernels_for(tail, binary))
        self.require(made, JoinedConv if tail.other is not None else _READS[layout] if binary else PixelConv, signs=True)
        if made is None:
            return False
        inputs = [self.planes_of(branch.source, layout) if binary else self.float_of(branch.source)]
        if tail.other is not None:
            inputs.append(self.planes_of(tail.other.source, tail.other.layout))
        if tail.shortcut is not None:
            inputs.append(self.planes_of(tail.shortcut, layout))
        kernel, pool = made
        value = self.call(branch.node, kernel, *inputs, layout=layout)
        if pool is not None:
            value = self.call(branch.node, pool, value, name="pool", layout=layout)
        self.planes[sign, layout] = value
        return True

    def kernels_of(self, name: str, pools: bool, make: Callable[[], tuple[Kernel, Pool | None] | None]) -> Any:
        """The kernel of a layer, and that of the max-pool behind it."""
        if self.given is None:
            return make()
        return (self.given[name], self.given[f"{name}_pool"] if pools else None) if name in self.given else None

    def require(self, made: Any, kinds: Any, signs: bool) -> None:
        """That kernels which were given suit their place."""
        if self.given is not None and made is not None:
            kernel, pool = made
            suits = isinstance(kernel, kinds) and isinstance(pool, (Pool, type(None)))
            if suits and isinstance(kernel, Layer):  # signs have thresholds, numbers a gain
                suits = (kernel.thresholds is not None, kernel.gain is None) == (signs, signs)
            if not suits:
                raise KeyError(f"a {type(kernel).__name__} stands where none belongs")

    def pack_head(self, node: fx.Node) -> bool:
        """Whether there is a kernel for a layer with the average pool before it."""
        head = self.tails.heads[node]
        made = self.kernels_of(f"{node.name}_sums", False, lambda: kernel_for_means(head))
        self.require(made, MeanLinear, signs=False)
        if made is None:
            for one in head.nodes:  # as if they did not belong together
                self.convert(one)
            return False
        self.finish(head.branch, made[0], self.planes_of(head.signs, "channels"))
        return True

    def pack_alone(self, node: fx.Node) -> bool:
        """Whether there is a kernel for a layer whose output is wanted as numbers."""
        branch = self.tails.layer_at(node)
        if branch is None or branch.source not in self.binary:
            return False
        made = self.kernels_of(f"{node.name}_sums", False, lambda: kernel_for_sums(branch))
        self.require(made, _READS[branch.layout], signs=False)
        if made is None:
            return False
        self.finish(branch, made[0], self.planes_of(branch.source, branch.layout))
        return True

    def finish(self, branch: Any, kernel: Any, planes: fx.Node) -> None:
        """A kernel that gives what the layer does."""
        if self.given is None:
            kernel.scale_(branch.layer.gain, branch.layer.output_bias)
        self.floats[branch.node] = self.call(branch.node, kernel, planes, name="sums")

    # -- values --------------------------------------------------------------------------------------------------------------------

    def hand_on(self, source: fx.Node, node: fx.Node) -> None:
        if source in self.before_sign:
            self.before_sign[node] = self.before_sign[source]
        for layout in LAYOUTS:
            if (source, layout) in self.planes:
                self.planes[node, layout] = self.planes[source, layout]

    def planes_of(self, node: fx.Node, layout: str) -> fx.Node:
        if (node, layout) not in self.planes:
            numbers = self.before_sign[node] if node in self.before_sign else self.float_of(node)
            self.planes[node, layout] = self.call(node, Pack(layout), numbers, name=layout, layout=layout)
        return self.planes[node, layout]

    def float_of(self, node: Any) -> Any:
        if node not in self.floats and node in self.before_sign:
            self.floats[node] = self.call(node, Sign(), self.before_sign[node], name="sign")
        elif node not in self.floats:
            planes = next(self.planes[node, layout] for layout in LAYOUTS if (node, layout) in self.planes)
            self.floats[node] = self.call(node, Unpack(), planes, name="unpack")
        return self.floats[node]

    def call(self, node: fx.Node, module: nn.Module, *args: Any, name: str = "", layout: str = "") -> fx.Node:
        """`layout` is that of the planes that come out, if planes do."""
        path = f"{node.name}_{name}" if name else _free(node.name)
        self.root.add_module(path, module)
        made = self.graph.call_module(path, args)
        made.name = path
        if layout:
            made.meta[LAYOUT] = layout
        return made


def _free(name: str) -> str:
    """A name that a dictionary of modules can have."""
    return f"{name}_layer" if hasattr(nn.ModuleDict, name) else name


def _put(root: nn.Module, path: str, value: Any) -> None:
    *prefix, name = path.split(".")
    for part in prefix:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        root.register_buffer(name, value)
    else:
        setattr(root, name, value)
