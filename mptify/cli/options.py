"""Command-line options that are generated from a config's fields, so that a new field needs no code here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mptify.errors import BadConfig

__all__ = ["with_options_of"]


def with_options_of(config: type[BaseModel], *, before: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for a command that takes `settings`, a dict: each field of `config` becomes an option in its place.

    Args:
        config: The config whose fields become options. Lists and mappings become options that may be repeated.
        before: The parameter of the command that the options are listed before.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = {name: _parameter(name, field) for name, field in config.model_fields.items()}
        parameters = list(inspect.signature(command, eval_str=True).parameters.values())
        own = [parameter for parameter in parameters if parameter.name != "settings"]
        at = [parameter.name for parameter in own].index(before)

        @functools.wraps(command)
        def run(**given: Any) -> None:
            settings = {name: _value(name, field, given.pop(name)) for name, field in config.model_fields.items()}
            command(settings=settings, **given)

        signature = inspect.Signature([*own[:at], *options.values(), *own[at:]])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}
        return run

    return decorate


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    flag, text = f"--{name.replace('_', '-')}", field.description
    kind, default = field.annotation, field.get_default(call_default_factory=True)
    if kind is bool:
        option = typer.Option(f"{flag}/--no-{flag[2:]}" if default else flag, help=text)
    elif _is_mapping(kind):
        kind, default = list[str] | None, None
        option = typer.Option(flag, help=f"{text} May be repeated.", metavar="PATTERN=VALUE")
    elif get_origin(kind) is tuple:
        choices = _choices(get_args(kind)[0])
        option = typer.Option(flag, help=f"{text} May be repeated.", metavar=choices or "TEXT")
        kind, default = list[str] | None, None
    elif get_origin(kind) is Literal:
        kind, option = str, typer.Option(flag, help=text, metavar=_choices(kind))
    else:
        option = typer.Option(flag, help=text)
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=Annotated[kind, option])


def _value(name: str, field: FieldInfo, given: Any) -> Any:
    if _is_mapping(field.annotation):
        return dict(_pair(name, text) for text in given or ())
    return tuple(given or ()) if get_origin(field.annotation) is tuple else given


def _pair(name: str, text: str) -> tuple[str, float]:
    pattern, _, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        pattern = ""
    if not pattern:
        raise BadConfig(f"--{name.replace('_', '-')} {text!r}: write PATTERN=VALUE, for instance 'layer1.*=0.5'.")
    return pattern, value


def _is_mapping(kind: Any) -> bool:
    return get_origin(kind) is dict


def _choices(kind: Any) -> str:
    return "|".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
