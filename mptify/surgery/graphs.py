"""The module that a rewritten region becomes."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from mptify.errors import MptifyError

__all__ = ["TicketGraph", "answers_of", "expect_default"]


class TicketGraph(fx.GraphModule):
    """A region whose edges were changed: an fx GraphModule, with one graph per mode where `train()` and `eval()` differ.

    It keeps what other code reads from the module it came from: plain attributes, and the methods of timm's that look at
    nothing else (`no_weight_decay`, `group_matcher`, `get_classifier`).
    """

    _graphs: dict[bool, fx.Graph]  # by mode; False also serves for a mode that has none
    original_type: type
    classifier_paths: tuple[str, ...]

    @classmethod
    def of(cls, root: nn.Module, graphs: dict[bool, fx.Graph]) -> TicketGraph:
        mode = root.training if root.training in graphs else False
        module = cls(root, graphs[mode], type(root).__name__)
        module._graphs = graphs
        for graph in graphs.values():  # whatever only the other mode calls
            for node in graph.nodes:
                if node.op in ("call_module", "get_attr"):
                    _copy_into_(module, root, str(node.target))
        for path, _ in [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]:
            _copy_into_(module, root, path)  # and what neither of them uses
        for name, value in root.__dict__.items():
            if not name.startswith("_") and name != "training" and not hasattr(module, name):
                setattr(module, name, value)
                module.remember(name)
        module._bind_methods(getattr(type(root), "original_type", type(root)))
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"):
            module.__dict__[hooks] = root.__dict__[hooks].copy()
        module.train(root.training)
        for part, source in _pairs(module, root):
            part.training = source.training
        return module

    def remember(self, attribute: str) -> None:
        """Have `deepcopy` and pickle carry this attribute along: fx copies none but those it is told of."""
        self.meta.setdefault("_user_preserved_attributes", {})[attribute] = getattr(self, attribute)

    def _bind_methods(self, original: type) -> None:
        self.original_type = original
        self.remember("original_type")
        if self.__dict__.get("classifier_paths"):
            object.__setattr__(self, "get_classifier", types.MethodType(_get_classifier, self))

    def keep_answers_(self, answers: dict[str, Any]) -> None:
        """Answer as the original model did when asked for its classifier or for parameter groups: the names are the same."""
        self.classifier_paths = answers.pop("get_classifier", ())
        self.remember("classifier_paths")
        self._bind_methods(self.original_type)
        for name, answer in answers.items():
            object.__setattr__(self, name, functools.partial(_answer, answer))
            self.remember(name)

    def train(self, mode: bool = True) -> TicketGraph:
        graphs = self.__dict__.get("_graphs", {})
        wanted = graphs.get(mode, graphs.get(False))
        if wanted is not None and wanted is not self._graph:
            self.graph = wanted
        return super().train(mode)

    def __deepcopy__(self, memo: Any) -> TicketGraph:
        graphs, self._graphs = self._graphs, {}
        modules = self.__dict__["_modules"]
        try:
            copied: Any = super().__deepcopy__(memo)
        finally:
            self._graphs = graphs
        for name, module in modules.items():  # fx copies only what the active graph calls
            copied._modules[name] = copy.deepcopy(module, memo)
        copied._graphs = {mode: copied._graph if graph is self._graph else copy.deepcopy(graph) for mode, graph in graphs.items()}
        copied._bind_methods(self.original_type)
        copied.__dict__["training"] = self.training
        return copied

    def __reduce__(self) -> Any:
        if len(self._graphs) > 1:
            raise MptifyError("A model that runs differently in train() and eval() can't be pickled whole; save its state_dict() instead.")
        return super().__reduce__()


def answers_of(model: nn.Module) -> dict[str, Any]:
    """What timm's optimizer factory asks a model, by method name and, for `group_matcher`, by its argument."""
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


def _answer(answers: dict[Any, Any], coarse: Any = None) -> Any:
    if coarse not in answers:
        raise MptifyError("This model has no coarse parameter groups.")
    return answers[coarse]


def expect_default(value: Any, default: Any, name: str) -> None:
    """Raise unless an optional argument was left at the value that the graph was traced with."""
    if value is not default and value != default:
        raise MptifyError(f"With changed edges this network runs with {name!r} at its default, {default!r}, only; it was traced so.")


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
    ours = dict(module.named_modules())
    for name, source in root.named_modules():
        if name and name in ours:
            yield ours[name], source
