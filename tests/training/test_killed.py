"""Killed at random moments, a run ends in the bytes of one that was left alone."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long


def test_killed_ten_times_a_run_ends_in_the_same_bytes(tmp_path):
    command = [sys.executable, "-m", "tests.training.killed", str(tmp_path), "0"]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=400
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert int(re.search(r"(\d+) within an epoch", result.stdout).group(1)) >= 3
    assert int(re.search(r"(\d+) while writing", result.stdout).group(1)) >= 1
    for name in ("last.ticket", "best.ticket"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    rows = [
        [json.loads(line) for line in (tmp_path / part / "metrics.jsonl").read_text().splitlines()]
        for part in ("whole", "parts")
    ]
    for one, other in zip(*rows, strict=True):
        for timed in ("seconds", "images_per_second"):
            del one[timed], other[timed]
        assert one == other
