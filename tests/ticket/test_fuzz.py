"""Twenty thousand mutated files in a process of its own, which may not take more than 200 MB beyond its start."""

import subprocess
import sys
from pathlib import Path

import pytest

from mptify.errors import DamagedTicket
from mptify.ticket.codec import from_bytes

FOUND = Path(__file__).parent / "found"


@pytest.mark.long
def test_mutated_files_are_refused_or_unchanged(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "tests.ticket.fuzz", "--files", "20000"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stderr[-3000:]
    assert "20000 files" in result.stdout


@pytest.mark.parametrize("path", sorted(FOUND.iterdir()), ids=lambda path: path.name)
def test_what_once_broke_the_reader_is_refused(path):
    with pytest.raises(DamagedTicket):
        from_bytes(path.read_bytes())
