"""The module that replaces a region whose edges change."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from mptify.errors import MptifyError, NotKept, NoTorchScript
from mptify.nn.layers import Ticketed
from mptify.surgery import graph_state
from mptify.surgery.hooks import copy_hooks_

__all__ = ["FEATURES", "HEAD", "TicketGraph", "answers_of", "expect_default"]

FEATURES, HEAD = "forward_features", "forward_head"  # timm's methods that are parts of `forward`

_EXTRACT = "torchvision's create_feature_extractor(model, nodes) returns any value of the graph"
_HINTS = {
    FEATURES: _EXTRACT,
    HEAD: _EXTRACT,
    "forward_intermediates": _EXTRACT,
    "set_grad_checkpointing": "torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) "
    "recomputes the whole network",
    "reset_classifier": "give the network its number of classes before the transform",
}


class TicketGraph(fx.GraphModule):
    """An fx GraphModule, with one graph per mode where `train()` and `eval()` differ.

    It keeps what other code reads from the original module: plain attributes, the methods that
    timm's optimizer factory calls (`no_weight_decay`, `group_matcher`), `get_classifier`, and
    `forward_features` and `forward_head` where `forward` consists of them. Other methods of the
    original class raise `NotKept`, an `AttributeError` that says what to do instead.
    """

    # By training mode; the entry of False also serves a mode without one.
    _graphs: dict[bool, fx.Graph]
    original_name: str
    original_module: str
    original_methods: frozenset[str]
    classifier_paths: tuple[str, ...]
    reset_classifier_with: Callable[..., None] | None

    @classmethod
    def of(
        cls, root: nn.Module, graphs: dict[bool, fx.Graph], dropped: Collection[str] = ()
    ) -> TicketGraph:
        """Run `graphs` on the submodules of `root`, without its `dropped` parameters."""
        mode = root.training if root.training in graphs else False
        module = cls(root, graphs[mode], type(root).__name__)
        module._graphs = graphs
        for graph in graphs.values():  # what only the other mode calls
            for node in graph.nodes:
                if node.op in ("call_module", "get_attr"):
                    _copy_into_(module, root, str(node.target))
        for path, _ in [
            *root.named_parameters(remove_duplicate=False),
            *root.named_buffers(remove_duplicate=False),
        ]:
            if path not in dropped:
                _copy_into_(module, root, path)  # what neither mode uses
        for name, value in root.__dict__.items():
            if not name.startswith("_") and name != "training" and not hasattr(module, name):
                setattr(module, name, value)
        original = getattr(type(root), "original_type", type(root))
        module.original_name, module.original_module = original.__name__, original.__module__
        module.original_methods = _methods_of(original)
        module.classifier_paths, module.reset_classifier_with = (), None
        copy_hooks_(root, module)
        module.train(root.training)
        for part, source in _pairs(module, root):
            if part is source:  # a leaf of the graph
                continue
            part.training = source.training
            for store in ("_modules", "_parameters", "_buffers"):
                _order_like_(getattr(part, store), getattr(source, store))
        return module

    def keep_answers_(self, answers: dict[str, Any]) -> None:
        """Keep the original model's answers about its classifier and its parameter groups."""
        self.classifier_paths = answers.pop("get_classifier", ())
        for coarse, matcher in answers.get("group_matcher", {}).items():
            if callable(matcher):
                groups = {
                    name: matcher(name) for name, _ in self.named_parameters(remove_duplicate=False)
                }
                answers["group_matcher"][coarse] = _GroupOf(groups)
        for name, answer in answers.items():
            object.__setattr__(self, name, functools.partial(_answer, answer))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "training":  # set by `train()`, or directly, to restore the mode of each module
            wanted = self._graph_of(value)
            if wanted is not None and wanted is not self._graph:
                self.graph = wanted

    def __prepare_scriptable__(self) -> Any:
        """Called by `torch.jit.script`."""
        raise NoTorchScript

    def _graph_of(self, mode: bool) -> fx.Graph | None:
        graphs = self.__dict__.get("_graphs", {})
        return graphs.get(mode, graphs.get(False))

    def output_layers(self) -> set[str]:
        """The ticket layers that no other ticket layer separates from the network's output."""
        found, seen = set(), set()
        waiting = [
            node for graph in self._graphs.values() for node in graph.nodes if node.op == "output"
        ]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "call_module" and isinstance(
                self.get_submodule(str(node.target)), Ticketed
            ):
                found.add(str(node.target))
            else:
                waiting += node.all_input_nodes
        return found

    # -- methods of the original model -------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        methods = self.__dict__.get("original_methods", ())
        if name not in methods:
            return super().__getattr__(name)
        if name == "get_classifier" and self.classifier_paths:
            return types.MethodType(_get_classifier, self)
        if name == "reset_classifier" and self.reset_classifier_with is not None:
            return functools.partial(self.reset_classifier_with, self)
        if name == FEATURES and self._marked("result_of", FEATURES):
            return self._run_features
        if name == HEAD and self._marked("input_of", HEAD):
            return self._run_head
        hint = _HINTS.get(name, "call it on the network before the transform")
        raise NotKept(
            f"{self.original_name}.{name} is gone: this ticket's forward is a graph, and the "
            "original method would run the layers "
            f"without the signs and norms in it; {hint}."
        )

    def _marked(self, role: str, name: str) -> fx.Node | None:
        graph = self._graph_of(self.training)
        assert graph is not None
        found = [node for node in graph.nodes if node.meta.get(role) == name]
        return found[0] if len(found) == 1 else None

    def _run_features(self, x: Any) -> Any:
        """The part of `forward` before the head."""
        end = self._marked("result_of", FEATURES)
        assert end is not None
        inputs = [node for node in end.graph.nodes if node.op == "placeholder"]
        given = {node: node.args[0] if node.args else x for node in inputs} | {inputs[0]: x}
        return self._run_between(given, end)

    def _run_head(self, x: Any, pre_logits: bool = False) -> Any:
        """The part of `forward` after the features."""
        if pre_logits:
            raise NotKept(
                f"{self.original_name}.forward_head runs with pre_logits=False only, as its graph "
                "was traced."
            )
        start = self._marked("input_of", HEAD)
        assert start is not None
        output = next(node for node in start.graph.nodes if node.op == "output")
        return self._run_between({start: x}, output)

    def _run_between(self, given: dict[fx.Node, Any], end: fx.Node) -> Any:
        needed, waiting = set(given), [end]
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        interpreter = fx.Interpreter(self, garbage_collect_values=False, graph=end.graph)
        interpreter.env = dict(given)
        for node in end.graph.nodes:
            if node in needed and node not in given:
                if node.op == "placeholder":
                    raise NotKept(
                        f"{self.original_name}.forward_head can't run alone: in this network it "
                        f"reads {node.target}, too."
                    )
                interpreter.env[node] = interpreter.run_node(node)
        return interpreter.env[end]

    # -- copies ------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """The state without the graphs and the code that fx generates."""
        return {name: value for name, value in self.__dict__.items() if name not in _FX_STATE}

    def __deepcopy__(self, memo: Any) -> TicketGraph:
        copied = _empty_graph(type(self).__name__)
        memo[id(self)] = copied
        graphs = {mode: copy.deepcopy(graph) for mode, graph in self._graphs.items()}
        copied._fill_(copy.deepcopy(self._state(), memo), graphs)
        return copied

    def __reduce__(self) -> Any:
        graphs = {mode: graph_state.to_state(graph) for mode, graph in self._graphs.items()}
        return _empty_graph, (type(self).__name__,), (self._state(), graphs)

    def __setstate__(self, state: tuple[dict[str, Any], dict[bool, Any]]) -> None:
        attributes, graphs = state
        self._fill_(
            attributes, {mode: graph_state.from_state(graph) for mode, graph in graphs.items()}
        )

    def _fill_(self, attributes: dict[str, Any], graphs: dict[bool, fx.Graph]) -> None:
        self.__dict__.update(attributes)
        self._graphs = graphs
        graph = self._graph_of(self.training)
        assert graph is not None
        self.graph = graph


_FX_STATE = set(vars(fx.GraphModule(nn.Module(), fx.Graph()))) - set(vars(nn.Module())) | {
    "_graph",
    "_graphs",
} - {"meta"}


def _empty_graph(name: str) -> TicketGraph:
    return TicketGraph(nn.Module(), fx.Graph(), name)


def _methods_of(original: type) -> frozenset[str]:
    """The public methods of a class that graph modules lack."""
    own = {
        name
        for name in dir(original)
        if not name.startswith("_") and callable(getattr(original, name, None))
    }
    return frozenset(own - set(dir(fx.GraphModule)))


def answers_of(model: nn.Module) -> dict[str, Any]:
    """What the model answers to timm's optimizer factory, by method and argument."""
    answers: dict[str, Any] = {}
    for name in ("no_weight_decay", "no_weight_decay_keywords"):
        if callable(getattr(model, name, None)):
            answers[name] = {None: getattr(model, name)()}
    matcher = getattr(model, "group_matcher", None)
    if callable(matcher):
        answers["group_matcher"] = {None: matcher(), False: matcher(False)}
        with contextlib.suppress(AssertionError):  # some models have no coarse groups
            answers["group_matcher"][True] = matcher(True)
    classifier = getattr(model, "get_classifier", None)
    if callable(classifier):
        heads = classifier() if isinstance(classifier(), tuple) else (classifier(),)
        names = {id(module): name for name, module in model.named_modules()}
        answers["get_classifier"] = tuple(names[id(head)] for head in heads if id(head) in names)
    return answers


def _get_classifier(self: TicketGraph) -> Any:
    heads = tuple(self.get_submodule(path) for path in self.classifier_paths)
    return heads if len(heads) > 1 else heads[0]


@dataclass(frozen=True)
class _GroupOf:
    """The answers of a `group_matcher` function, since local functions can't be pickled."""

    groups: dict[str, Any]

    def __call__(self, name: str) -> Any:
        return self.groups[name]


def _answer(answers: dict[Any, Any], coarse: Any = None) -> Any:
    if coarse not in answers:
        raise MptifyError("This model has no coarse parameter groups.")
    return answers[coarse]


def expect_default(value: Any, default: Any, name: str) -> None:
    """Raise unless an optional argument has the value that the graph was traced with."""
    if isinstance(value, fx.Proxy):  # the graph is being traced again
        value.tracer.create_proxy("call_function", expect_default, (value, default, name), {})
        return
    if value is not default and value != default:
        raise MptifyError(
            f"With changed edges this network runs with {name!r} at its default, {default!r}, "
            "only, as it was traced."
        )


def _copy_into_(module: nn.Module, root: nn.Module, target: str) -> None:
    *prefix, name = target.split(".")
    here, there = module, root
    for part in prefix:
        there = there._modules[part]  # type: ignore[assignment]
        if part not in here._modules:
            if here is not module and isinstance(here, type(there)):
                return
            here.add_module(part, nn.Module())
        here = here._modules[part]  # type: ignore[assignment]
    for store in ("_modules", "_parameters", "_buffers"):
        if name in getattr(there, store) and name not in getattr(here, store):
            getattr(here, store)[name] = getattr(there, store)[name]
    if not hasattr(here, name):  # a constant that `forward` made
        here.register_buffer(name, getattr(there, name), persistent=False)


def _pairs(module: nn.Module, root: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    ours = dict(module.named_modules(remove_duplicate=False))
    for name, source in root.named_modules(remove_duplicate=False):
        if name in ours:
            yield ours[name], source


def _order_like_(store: dict[str, Any], other: Collection[str]) -> None:
    """Restore the order of the original's modules, by which shared tensors get their names."""
    for name in [
        *(name for name in other if name in store),
        *(name for name in store if name not in other),
    ]:
        store[name] = store.pop(name)
