"""One bad model never stops a sweep."""

import pytest

from mptify.cli import zoo_run
from mptify.errors import BadConfig
from mptify.models.registry import Entry
from mptify.tools import zoo_check, zoo_rows, zoo_table

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_what_goes_wrong_becomes_part_of_the_row():
    row = zoo_check.check_model(Entry("torchvision", "no_such_model"))
    assert "no_such_model" in row["error"]
    assert not zoo_rows.passed(row)


def test_a_sweep_survives_a_process_that_dies(tmp_path, monkeypatch):
    rows = []
    entries = [Entry("torchvision", "no_such_model"), Entry("torchvision", "squeezenet1_1")]
    zoo_check.check_all(entries, tmp_path / "rows.jsonl", 1, rows.append)
    assert [zoo_rows.passed(row) for row in rows] == [False, True]
    monkeypatch.setattr(zoo_check, "_work", _die)
    zoo_check.check_all([Entry("torchvision", "alexnet")], tmp_path / "rows.jsonl", 1, rows.append)
    assert rows[-1]["error"] == "its process ended with code 7"


def _die(pipe):
    import os

    os._exit(7)


def test_layers_that_are_dead_anyway_are_told_from_broken_ones():
    row = zoo_check.check_model(Entry("timm", "csatv2"))
    assert zoo_rows.passed(row)
    assert "stages.0.0.attn.attn.qkv" in row["modes"]["1/32"]["dead"]
    assert "no gradient in the dense network either" in zoo_table.markdown([row])


def test_layers_that_one_seed_switches_off_are_told_from_broken_ones():
    row = zoo_check.check_model(Entry("timm", "mnasnet_small"))
    assert zoo_rows.passed(row)
    assert row["modes"]["1/32"]["unlucky"] == [
        "blocks.3.0.se.conv_expand",
        "blocks.3.0.se.conv_reduce",
    ]
    assert "2 layers get a gradient with another seed or other images only" in zoo_table.markdown(
        [row]
    )


def _mode(**found):
    return {
        "parts": 1,
        "weights": 10,
        "converted": 10,
        "left": [],
        "failed": {},
        "ran": True,
        **found,
    }


OLD = {
    "model": "timm:a",
    "parameters": 10,
    "modes": {"1/32": _mode(), "1/1": _mode()},
    "seconds": 1,
}
MORE = {
    "model": "timm:a",
    "parameters": 10,
    "modes": {"1/4": _mode(converted=5)},
    "seconds": 2,
    "bits": ["1/4"],
}


def test_rows_of_the_usual_modes_keep_their_format():
    row = zoo_check.check_model(Entry("timm", "test_vit2"))
    assert list(row) == ["model", "parameters", "modes", "seconds"]
    assert list(row["modes"]) == ["1/32", "1/1"]


def test_other_modes_are_checked_by_the_same_invariants_and_named_in_the_row():
    row = zoo_check.check_model(Entry("timm", "test_vit2"), ("1/8", "1/2"))
    assert zoo_rows.passed(row), row
    assert list(row["modes"]) == row["bits"] == ["1/8", "1/2"]
    assert all(mode["ran"] for mode in row["modes"].values())
    assert row["modes"]["1/2"]["exempt"]


def test_a_file_of_rows_is_continued_with_the_modes_it_lacks(tmp_path):
    path, rows = tmp_path / "rows.jsonl", []
    models = [Entry("timm", "test_vit2"), Entry("torchvision", "no_such_model")]
    for bits in (("1/32",), ("1/32", "1/4"), ("1/4", "1/32")):
        zoo_check.check_all(models, path, 1, rows.append, bits)
    assert [(row["model"], row["bits"]) for row in rows] == [
        (str(model), [bits]) for bits in ("1/32", "1/4") for model in models
    ]
    vit, other = zoo_rows.merged(zoo_rows.read_rows(path))
    assert list(vit["modes"]) == vit["bits"] == ["1/32", "1/4"]
    assert zoo_rows.passed(vit)
    assert "no_such_model" in other["error"]
    assert zoo_rows.missing_bits("timm:test_vit2", ["1/1", "1/4"], [vit]) == ("1/1",)


def test_modes_of_several_rows_of_a_model_make_one_row():
    (row,) = zoo_rows.merged([OLD, MORE])
    assert list(row["modes"]) == row["bits"] == ["1/32", "1/4", "1/1"]
    assert row["seconds"] == 3
    assert zoo_rows.passed(row)
    assert zoo_rows.merged([OLD]) == [OLD]
    (failed,) = zoo_rows.merged([OLD, {**MORE, "modes": {}, "error": "too slow"}])
    assert failed["error"] == "too slow"
    assert not zoo_rows.passed(failed)
    assert not zoo_rows.passed({**MORE, "modes": {"1/4": _mode(failed={"I1": ["conv"]})}})


def test_the_table_has_a_column_for_each_mode():
    other = {**OLD, "model": "timm:b"}
    page = zoo_table.markdown(zoo_rows.merged([OLD, other, MORE]))
    assert "to 1/32 at 80 %, to 1/4 at 80 % and to 1/1 at 75 %." in page
    assert "2 convert in all three modes; 2 of them pass" in page
    assert "and one evaluation in 1/4 and 1/1." in page
    assert "| converted 1/32 | converted 1/4 | converted 1/1 | checks |" in page
    assert "| timm:a | 0.0 M | whole | 100.00 % | 50.00 % | 100.00 % | all |" in page
    assert "| timm:b | 0.0 M | whole | 100.00 % | – | 100.00 % | all |" in page
    assert "1 convert in both modes" in zoo_table.markdown([OLD])


def test_modes_are_chosen_by_their_bits():
    assert zoo_run.checked_bits(None) == ("1/32", "1/1")
    assert zoo_run.checked_bits(["1/2", "1/8", "1/2"]) == ("1/8", "1/2")
    with pytest.raises(BadConfig, match=r"--bits 32/1: should be one of 1/32, 1/8, 1/4, 1/2, 1/1"):
        zoo_run.checked_bits(["32/1"])
