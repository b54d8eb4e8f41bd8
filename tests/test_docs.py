"""What mkdocs makes of the program: the command line's reference, a page per recipe, formulas."""

import html
import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from mptify.cli import app
from mptify.recipe_files import find_recipe, recipe_names

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_and_option_is_in_the_reference(hooks):
    page = hooks.command_line()
    for command in app.registered_commands:
        assert f"## mptify {command.name}\n" in page
    for group in app.registered_groups:
        for command in group.typer_instance.registered_commands:
            assert f"### mptify {group.name} {command.name}\n" in page
    assert (
        "| `--set KEY=VALUE` | Change any setting: lr=0.05, ticket.seed=1, data.flip=true. May be repeated. |"
        in page
    )
    assert "| `--baseline/--no-baseline` |" in page
    assert "| `--resume` |" in page
    assert (
        "| `--prune NUMBER` | The fraction of weights removed (the paper's P), at least 0 and below 1. | `0.8` |"
        in page
    )


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipes_page_says_what_it_reproduces_and_how_to_run_it(name, hooks):
    page, (settings, _) = hooks.recipe_page(name), find_recipe(name)
    about = settings["about"]
    assert f"mptify search --recipe {name}" in page
    assert f"model: {settings['model']}" in page
    for place in about.get("reproduces", ()):
        assert place in page
    if about.get("top1"):
        assert f"| the paper's top-1 | {about['top1']} |" in page
    assert ("not run in full" in page) != (
        name in yaml.safe_load((ROOT / "docs/data/measured.yaml").read_text())
    )


def test_what_was_measured_belongs_to_recipes_and_is_where_it_says():
    for name, measured in yaml.safe_load((ROOT / "docs/data/measured.yaml").read_text()).items():
        assert name in recipe_names()
        figure = re.match(r"[\d.]+", measured["top1"])[0]
        assert figure in (ROOT / "docs" / measured["where"]).read_text(), (name, figure)


def test_formulas_become_mathml(hooks):
    made = hooks.on_page_content(
        r'<p>a <span class="arithmatex">\(\alpha &lt; 1\)</span> b <div class="arithmatex">\[x^2\]</div></p>'
    )
    assert "arithmatex" not in made
    assert made.count("<math") == 2
    assert "α" in html.unescape(made)
    assert 'display="block"' in made
