"""One bad model never stops a sweep."""

import pytest

from mptify.models.registry import Entry
from mptify.tools import zoo_check, zoo_table

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_what_goes_wrong_becomes_part_of_the_row():
    row = zoo_check.check_model(Entry("torchvision", "no_such_model"))
    assert "no_such_model" in row["error"]
    assert not zoo_check.passed(row)


def test_a_sweep_survives_a_process_that_dies(tmp_path, monkeypatch):
    rows = []
    entries = [Entry("torchvision", "no_such_model"), Entry("torchvision", "squeezenet1_1")]
    zoo_check.check_all(entries, tmp_path / "rows.jsonl", 1, rows.append)
    assert [zoo_check.passed(row) for row in rows] == [False, True]
    monkeypatch.setattr(zoo_check, "_work", _die)
    zoo_check.check_all([Entry("torchvision", "alexnet")], tmp_path / "rows.jsonl", 1, rows.append)
    assert rows[-1]["error"] == "its process ended with code 7"


def _die(pipe):
    import os

    os._exit(7)


def test_layers_that_are_dead_anyway_are_told_from_broken_ones():
    row = zoo_check.check_model(Entry("timm", "csatv2"))
    assert zoo_check.passed(row)
    assert "stages.0.0.attn.attn.qkv" in row["modes"]["1/32"]["dead"]
    assert "no gradient in the dense network either" in zoo_table.markdown([row])


def test_layers_that_one_seed_switches_off_are_told_from_broken_ones():
    row = zoo_check.check_model(Entry("timm", "mnasnet_small"))
    assert zoo_check.passed(row)
    assert row["modes"]["1/32"]["unlucky"] == [
        "blocks.3.0.se.conv_expand",
        "blocks.3.0.se.conv_reduce",
    ]
    assert "2 layers get a gradient with another seed only" in zoo_table.markdown([row])
