"""What timm does with its networks works on tickets or is refused, and the docs say which."""

import re
from pathlib import Path

import pytest

from mptify.tools.compatibility import BEHAVIOURS, Cell, State, cells_in, check_family, page, row
from mptify.tools.compatibility.families import FAMILIES
from mptify.tools.zoo_rows import DEFAULT_BITS

PAGE = (Path(__file__).parents[1] / "docs/compatibility.md").read_text()
QUICK = (
    "test_resnet",
    "test_vit",
    "test_convnext",
    "test_efficientnet",
    "beit_base_patch16_224",
    "cait_xxs24_224",
)
SLOW = (  # half of the time that all families take
    "pnasnet5large",
    "inception_resnet_v2",
    "inception_v4",
    "mobilenetv5_base",
    "nasnetalarge",
    "gcvit_xxtiny",
    "gmlp_ti16_224",
    "sam2_hiera_tiny",
    "focalnet_tiny_srf",
    "volo_d1_224",
    "maxvit_pico_rw_256",
)
HOW = "python -m mptify.tools.compatibility > docs/compatibility.md"


@pytest.fixture(scope="module")
def numbers():
    """The page's numbers of the reasons for refusals."""
    found = re.findall(r"^(\d+)\. (.*)\.$", PAGE, re.MULTILINE)
    return {reason: int(number) for number, reason in found}


def _marked(name):
    marks = [] if name in QUICK else [pytest.mark.sweep if name in SLOW else pytest.mark.long]
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [_marked(name) for name in FAMILIES])
def test_nothing_fails_and_the_page_says_what_works(name, numbers):
    cells = check_family(name)
    assert not list(cells_in({name: cells}, State.FAILED))
    for bits in DEFAULT_BITS:
        section = PAGE.partition(f"### {bits}\n")[2].partition("###")[0]
        reasons = {cell.reason for cell in cells[bits].values() if cell.state is State.REFUSED}
        assert reasons <= numbers.keys(), HOW
        assert row(name, cells[bits], numbers) in section, HOW


def test_a_failure_shows_in_the_page_and_in_the_counts():
    works, failed = Cell(State.WORKS), Cell(State.FAILED, "KeyError: 'x'")
    good = {bits: dict.fromkeys(BEHAVIOURS, works) for bits in DEFAULT_BITS}
    bad = {bits: dict.fromkeys(BEHAVIOURS, works) | {"pickle": failed} for bits in DEFAULT_BITS}
    made = page({"test_resnet": good, "test_vit": bad})
    assert "- `test_vit` in 1/1, pickle: KeyError: 'x'\n" in made
    assert "whole model | 1 of 2 | 1 of 2 |" in made
    assert "✗" not in page({"test_resnet": good})


def test_every_family_has_a_line_per_mode():
    for name in FAMILIES:
        assert PAGE.count(f"| `{name}` |") == len(DEFAULT_BITS), name
    assert re.findall(r"^\| `(\w+)` \|.*✗", PAGE, re.MULTILINE) == []
