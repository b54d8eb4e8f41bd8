"""Imports point one way, and every example in the docs runs."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from mptify.tools.settings_page import page

ROOT = Path(__file__).parents[1]
FOLDERS = [
    "errors", "files", "registry", "config", "recipe_files",
    "nn", "models", "surgery", "ticket", "runtime", "training", "export", "report", "tools", "cli",
]  # fmt: skip
LEVEL = {name: level for level, name in enumerate(FOLDERS)}
FILES = sorted(
    path for path in (ROOT / "mptify").rglob("*.py") if path.name not in ("__main__.py",)
)


def part(path):
    first = path.relative_to(ROOT / "mptify").parts[0]
    return first.removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    if path == ROOT / "mptify/__init__.py":
        return
    here = part(path)
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module == "mptify":
            modules = [
                f"mptify.{alias.name}" for alias in node.names if alias.name != "__version__"
            ]
        for module in modules:
            if module.startswith("mptify."):
                there = module.split(".")[1]
                assert LEVEL[there] <= LEVEL[here], f"{path.name} imports {module}"


def test_no_test_imports_another_test():
    """What tests share is in tests/helpers."""
    for path in (ROOT / "tests").rglob("*.py"):
        found = re.findall(r"^ *(?:from|import) (tests\.[\w.]*\btest_\w+)", path.read_text(), re.M)
        assert not found, f"{path.name} imports {found}"


def test_only_the_command_line_prints():
    for path in FILES:
        if part(path) != "cli":
            calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
            assert not [
                n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"
            ], path


@pytest.mark.parametrize(
    ("language", "files"), [("python", "docs/examples/*.py"), ("yaml", "recipes/**/*.yaml")]
)
def test_every_snippet_in_the_docs_is_a_file_word_for_word(language, files):
    """Or whole lines of one; the examples are run below."""
    texts = {str(path.relative_to(ROOT)): "\n" + path.read_text() for path in ROOT.glob(files)}
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for snippet in re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL):
            assert any("\n" + snippet in text for text in texts.values()), (path.name, snippet)


def test_the_page_of_settings_is_what_the_program_says():
    assert (ROOT / "docs/settings.md").read_text() == page(), (
        "python -m mptify.tools.settings_page > docs/settings.md"
    )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/examples").glob("*.py")), ids=lambda path: path.name
)
def test_the_examples_in_the_docs_run(path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [str(path)])
    if path.name == "in_timm.py":  # which is about the order of imports
        assert subprocess.run(
            [sys.executable, "-W", "error", str(path)], check=True, capture_output=True
        ).stdout
        return
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
