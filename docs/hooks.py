"""Pages that mkdocs makes from the program: the reference of the commands, recipes, formulas.

Formulas become MathML, which browsers draw by themselves: no script, nothing from elsewhere.
"""

from __future__ import annotations

import html
import inspect
import re
from pathlib import Path
from typing import Any, get_args

import yaml
from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent


def on_config(config: Any) -> Any:
    """The recipes' pages in the navigation, where it says `recipes/`."""
    from mptify.recipe_files import recipe_names

    pages: list[Any] = [
        "recipes/index.md",
        *({name: f"recipes/{name}.md"} for name in recipe_names()),
    ]
    for section in config.nav:
        for inner in section.values():
            for number, entry in enumerate(inner if isinstance(inner, list) else ()):
                if isinstance(entry, dict) and list(entry.values()) == ["recipes/"]:
                    inner[number] = {next(iter(entry)): pages}
    return config


def on_files(files: Files, config: Any) -> Files:
    from mptify.recipe_files import recipe_names

    made = {f"recipes/{name}.md": recipe_page(name) for name in recipe_names()}
    made |= {"cli.md": command_line(), "recipes/index.md": recipe_list()}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_content(content: str, **_: Any) -> str:
    """`\\(…\\)` in spans, and `\\[…\\]` in blocks, as arithmatex leaves them."""
    from latex2mathml.converter import convert

    def formula(found: re.Match[str]) -> str:
        return convert(html.unescape(found[2]), display="block" if found[1] == "div" else "inline")

    return re.sub(
        r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>',
        formula,
        content,
        flags=re.DOTALL,
    )


# -- the command line ------------------------------------------------------------------------------


def command_line() -> str:
    """All commands, with their arguments and options, as `--help` has them."""
    from mptify.cli import app

    parts = [
        "# The command line\n\nMade from the program. `mptify COMMAND --help` says the same.\n"
    ]
    parts += [_command(f"mptify {one.name}", one.callback, 2) for one in app.registered_commands]
    for group in app.registered_groups:
        parts.append(f"## mptify {group.name}\n\n{_prose(group.typer_instance.info.help or '')}\n")
        parts += [
            _command(f"mptify {group.name} {one.name}", one.callback, 3)
            for one in group.typer_instance.registered_commands
        ]
    return "\n".join(parts)


def _command(title: str, function: Any, level: int) -> str:
    from typer.models import ArgumentInfo

    shown = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        kind, info = get_args(parameter.annotation)
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        shown.append(
            (
                isinstance(info, ArgumentInfo),
                _shown(name, kind, info, default),
                info.help or "",
                default,
            )
        )
    usage = " ".join(
        [title, *(text for is_argument, text, *_ in shown if is_argument), "[OPTIONS]"]
    )
    lines = [
        "#" * level + f" {title}",
        "",
        f"```\n{usage}\n```",
        "",
        _prose(inspect.getdoc(function) or ""),
        "",
    ]
    lines += ["| | what it is | default |", "| --- | --- | --- |"]
    lines += [
        f"| `{_cell(text)}` | {_cell(told)} | {_default(default)} |"
        for _, text, told, default in shown
    ]
    return "\n".join([*lines, ""])


def _shown(name: str, kind: Any, info: Any, default: Any) -> str:
    """An argument, or an option with what it takes, as a person writes them."""
    from typer.models import ArgumentInfo

    if isinstance(info, ArgumentInfo):
        return info.metavar or name.upper()
    kinds = [one for one in get_args(kind) if one is not type(None)] or [kind]
    given = ", ".join(
        one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)
    )  # the first is taken for a default
    plain = name.replace("_", "-")
    if bool in kinds:
        return given or (f"--{plain}" if default is False else f"--{plain}/--no-{plain}")
    takes = info.metavar or {"int": "NUMBER", "float": "NUMBER", "Path": "PATH"}.get(
        getattr(kinds[0], "__name__", ""), "TEXT"
    )
    return f"{given or '--' + plain} {takes}"


def _default(value: Any) -> str:
    return "" if value is None or value is False else f"`{value}`"


def _cell(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def _prose(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


# -- recipes ---------------------------------------------------------------------------------------


def recipe_list() -> str:
    from mptify.cli.recipes_run import recipe_info
    from mptify.config import make_recipe
    from mptify.recipe_files import find_recipe, recipe_names

    lines = [
        "# Recipes", "",
        "One per row of the paper's tables that is ours to run, with all its settings (appendix A)."
        " `mptify recipes` lists them too.", "",
        "| recipe | network | bits | pruned | reproduces | the paper's top-1 |",
        "| --- | --- | --- | ---: | --- | ---: |",
    ]  # fmt: skip
    for name in recipe_names():
        facts = recipe_info(name, make_recipe(*find_recipe(name)))
        about = facts["about"]
        cells = [
            f"[{name}]({name}.md)", f"`{facts['model']}`", facts["bits"] or "dense",
            "" if facts["prune"] is None else f"{100 * facts['prune']:g} %",
            ", ".join(about.get("reproduces", ())) or about.get("what", ""),
            str(about.get("top1") or ""),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", "Sweeps run many of them: [`mptify sweep`](../results.md#sweeps).", ""]
    )


def recipe_page(name: str) -> str:
    """A recipe, what it reproduces, the paper's result, ours, and how to run it."""
    from mptify.cli.recipes_run import recipe_info
    from mptify.config import make_recipe
    from mptify.recipe_files import find_recipe, recipe_text

    told = recipe_info(name, make_recipe(*find_recipe(name)))
    about, measured = (
        told["about"],
        yaml.safe_load((HERE / "data/measured.yaml").read_text()).get(name),
    )
    budget = about.get("budget", {})
    ours = (
        f"{measured['top1']} ({measured['compute']}; [more](../{measured['where']}))"
        if measured
        else "not run in full: it needs a GPU"
    )
    facts = {
        "reproduces": ", ".join(about.get("reproduces", ()))
        + (f": {about['row']}" if "row" in about else "")
        or about.get("what"),
        "the paper's top-1": about.get("top1") or "drawn, not printed"
        if "reproduces" in about
        else None,
        "parameters, as printed": about.get("parameters"),
        "settings": about.get("settings"),
        "budget": budget
        and f"{budget['epochs']} epochs of {budget['images']:,} images, {budget['steps']:,} steps",
        "measured by us": ours,
        "note": about.get("note"),
    }
    rows = [f"| {key} | {value} |" for key, value in facts.items() if value]
    return "\n".join([
        f"# {name}", "", "| | |", "| --- | --- |", *rows, "", f"```\n{told['command']}\n```", "",
        f"```yaml\n{recipe_text(name).rstrip()}\n```", "",
    ])  # fmt: skip
