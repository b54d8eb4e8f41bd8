"""Generate command-line options from the fields of a config."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mptify.errors import BadConfig

__all__ = ["with_options_of"]

Command = Callable[..., None]


def with_options_of(
    config: type[BaseModel],
    *,
    before: str,
    into: str = "settings",
    without: Collection[str] = (),
    panel: str | None = None,
    only_given: bool = False,
) -> Callable[[Command], Command]:
    """Decorate a command: each field of `config` becomes an option.

    The command receives the values as one dict. Options for lists and mappings may be repeated.

    Args:
        config: The config whose fields become options.
        before: The command's parameter in front of which the options are listed.
        into: The command's parameter that receives the dict.
        without: Fields that get no option.
        panel: The heading of the options in the help text.
        only_given: Whether the dict holds only the options on the command line. The options then
            have no defaults.

    Returns:
        The decorator.
    """
    fields = {name: one for name, one in config.model_fields.items() if name not in without}

    def decorate(command: Command) -> Command:
        options = [_parameter(name, field, panel, only_given) for name, field in fields.items()]
        parameters = list(inspect.signature(command, eval_str=True).parameters.values())
        own = [parameter for parameter in parameters if parameter.name != into]
        at = [parameter.name for parameter in own].index(before)

        @functools.wraps(command)
        def run(**given: Any) -> None:
            values = {name: _value(name, field, given.pop(name)) for name, field in fields.items()}
            if only_given:
                values = {
                    name: value for name, value in values.items() if value not in (None, (), {})
                }
            command(**{into: values}, **given)

        signature = inspect.Signature([*own[:at], *options, *own[at:]])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
        return run

    return decorate


def _parameter(
    name: str, field: FieldInfo, panel: str | None, only_given: bool
) -> inspect.Parameter:
    flag, text = f"--{name.replace('_', '-')}", field.description
    kind: Any = field.annotation
    default = None if only_given else field.get_default(call_default_factory=True)
    settings: dict[str, Any] = {"help": text, "rich_help_panel": panel}
    if kind is bool:
        flag = f"{flag}/--no-{flag[2:]}" if default or only_given else flag
    elif get_origin(kind) is dict:
        kind, default = list[str], None
        settings |= {"help": f"{text} May be repeated.", "metavar": "PATTERN=VALUE"}
    elif get_origin(kind) is tuple:
        choices = _choices(get_args(kind)[0]) or "TEXT"
        kind, default = list[str], None
        settings |= {"help": f"{text} May be repeated.", "metavar": choices}
    elif get_origin(kind) is Literal:
        settings["metavar"] = _choices(kind)
        kind = str
    if default is None and type(None) not in get_args(kind):
        kind = kind | None
    annotation = Annotated[kind, typer.Option(flag, **settings)]
    kind_of_parameter = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind_of_parameter, default=default, annotation=annotation)


def _value(name: str, field: FieldInfo, given: Any) -> Any:
    """The value of an option, or None if it has no default and is not on the command line."""
    if get_origin(field.annotation) is dict:
        return dict(_pair(name, text) for text in given or ())
    if get_origin(field.annotation) is tuple:
        return tuple(given or ())
    return given


def _pair(name: str, text: str) -> tuple[str, float]:
    pattern, _, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        pattern = ""
    if not pattern:
        flag = f"--{name.replace('_', '-')}"
        raise BadConfig(f"{flag} {text!r}: write PATTERN=VALUE, such as 'layer1.*=0.5'.")
    return pattern, value


def _choices(kind: Any) -> str:
    return "|".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
