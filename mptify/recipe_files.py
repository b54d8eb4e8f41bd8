"""Read and write recipes as YAML, and change single settings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from mptify.config import SearchConfig
from mptify.errors import BadConfig

__all__ = [
    "find_recipe",
    "parse_changes",
    "recipe_folder",
    "recipe_names",
    "recipe_text",
    "to_yaml",
    "with_setting",
    "with_settings",
]


def recipe_folder() -> Path:
    """The folder of the recipes that come with mptify."""
    here = Path(__file__).parent
    installed = here / "recipes"
    return installed if installed.is_dir() else here.parent / "recipes"


def recipe_names() -> list[str]:
    """The names of the recipes that come with mptify."""
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def recipe_text(name: str) -> str:
    """The text of a recipe, with comments: a file, or one that comes with mptify."""
    path = Path(name)
    if not path.is_file():
        if path.suffix in (".yaml", ".yml") or path.parent != Path():
            raise BadConfig(f"{name}: there is no such file.")
        path = recipe_folder() / f"{name}.yaml"
    if not path.is_file():
        near = difflib.get_close_matches(name, recipe_names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else "`mptify recipes` lists them."
        raise BadConfig(f"There is no recipe {name!r}; {hint}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadConfig(f"{name}: this is not YAML.") from None


def find_recipe(name: str) -> tuple[dict[str, Any], str]:
    """The unchecked settings of a recipe, and its name for error messages."""
    text = recipe_text(name)
    try:
        settings = yaml.load(text, _OnceOnly)
    except yaml.YAMLError as error:
        where = (
            f" (line {error.problem_mark.line + 1})"
            if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark
            else ""
        )
        raise BadConfig(f"{name}: this is not YAML{where}.") from None
    except BadConfig as error:
        raise BadConfig(f"{name}: {error}") from None
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise BadConfig(f"{name}: a recipe is a list of `key: value` lines.")
    return settings, name


class _OnceOnly(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise BadConfig(
                    f"{key} is set twice, the second time in line "
                    f"{node.value[number][0].start_mark.line + 1}."
                )
        return super().construct_mapping(node, deep)


def with_settings(settings: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Unchecked settings with `key=value` changes; `ticket.prune=0.9` changes a section."""
    changed = dict(settings)
    for key, value in parse_changes(changes).items():
        try:
            changed = with_setting(changed, key, value)
        except BadConfig as error:
            raise BadConfig(f"--set {error}") from None
    return changed


def parse_changes(changes: Iterable[str]) -> dict[str, Any]:
    """Parse `key=value` texts."""
    parsed = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip() or not text.strip():
            raise BadConfig(
                f"--set {change!r}: write key=value, for instance lr=0.05 or ticket.prune=0.9."
            )
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        parsed[key.strip()] = _number(value)
    return parsed


def with_setting(settings: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of unchecked settings with one changed."""
    changed = dict(settings)
    sections, last = _path(key)
    inside = changed
    for section in sections:
        inner = inside.get(section)
        inner = {"source": inner} if section == "data" and isinstance(inner, str) else inner
        if inner is not None and not isinstance(inner, dict):
            raise BadConfig(f"{key}={value!r}: {section} is not a section.")
        inside[section] = dict(inner or {})
        inside = inside[section]
    inside[last] = value
    return changed


def _path(key: str) -> tuple[list[str], str]:
    """The sections of a dotted key, and its name there; layer names may contain dots."""
    before, overrides, layer = key.partition(".prune_overrides.")
    if overrides:
        return [*before.split("."), "prune_overrides"], layer
    *sections, last = key.split(".")
    return sections, last


def _number(value: Any) -> Any:
    """Convert numbers such as 1e-4, which YAML reads as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def to_yaml(recipe: SearchConfig) -> str:
    """All settings as YAML, including defaults."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
