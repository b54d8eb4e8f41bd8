"""How the program begins and ends: interrupted while it imports, on a full device, into a closed pipe."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
(SCRIPT,) = re.findall(r"^mptify = \"(.+)\"$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)

IMPORTS = [
    "typer",
    "mptify.cli.search",
    "mptify.recipe_files",
    "pydantic",
    "numpy",
    "torch",
    "torch.nn",
    "mptify.surgery",
    "yaml",
]
PRINTING = [
    "recipes",
    "recipes digits",
    "--version",
    "--help",
    "search -h",
    "convert mptify:conv2 --json",
    "zoo --list",
]
SEARCH = "search --no-baseline --set epochs=1 --set data.train_images=100 --threads 1"
INTERRUPTED = """
import os, runpy, signal, sys

at, how, *rest = sys.argv[1:]

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == at:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["mptify", *rest]
if how == "module":
    runpy.run_module("mptify", run_name="__main__", alter_sys=True)
else:
    module, _, function = how.partition(":")
    getattr(__import__(module, fromlist=[function]), function)()
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["module", SCRIPT])
@pytest.mark.parametrize("at", IMPORTS)
def test_ctrl_c_during_imports_is_one_line(at, how, tmp_path):
    command = [sys.executable, "-c", INTERRUPTED, at, how, "search", "--out", str(tmp_path / "run")]
    found = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path)
    assert found.returncode == 130, found.stderr[-2000:]
    assert found.stderr == "mptify: stopped at once.\n"
    assert not list(tmp_path.iterdir())


def test_the_program_begins_without_torch():
    code = "import mptify, mptify.__main__, mptify.cli, sys; print([m for m in ('torch', 'numpy', 'timm') if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert found.stdout == "[]\n", found.stderr


def test_every_public_name_is_there_and_no_other():
    code = (
        "import mptify, types\n"
        "assert set(mptify.__all__) <= set(dir(mptify))\n"
        "for name in mptify.__all__: assert not isinstance(getattr(mptify, name), types.ModuleType), name\n"
        "mptify.surgery.plans, mptify.models.conv2\n"  # packages, without an import of their own
        "try: mptify.nothing\n"
        "except AttributeError as error: print(error)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert found.stdout == "module 'mptify' has no attribute 'nothing'\n", found.stderr


# -- devices and pipes -------------------------------------------------------------------------------------------------------


def shell(command, cwd, **options):
    command = command.replace("mptify", f"{sys.executable} -m mptify", 1)
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=ENVIRONMENT, cwd=cwd, **options
    )


@pytest.mark.long
@pytest.mark.parametrize("command", PRINTING)
def test_a_full_device_is_told_in_one_line(command, tmp_path):
    found = shell(f"mptify {command} > /dev/full", tmp_path)
    assert found.returncode == 1, found.stderr
    assert found.stderr == "mptify: the output can't be written (No space left on device).\n"


@pytest.mark.parametrize("command", ["recipes", "--version", "--help", "convert mptify:conv2"])
def test_a_closed_pipe_and_no_output_at_all_are_no_errors_of_ours(command, tmp_path):
    for how in ("| true", "| head -n 1 > /dev/null", ">&-"):
        found = shell(f"mptify {command} {how}", tmp_path)
        assert "Traceback" not in found.stderr
        assert "Exception ignored" not in found.stderr


@pytest.mark.parametrize("command", ["recipes", "recipes digits", "--version", SEARCH])
def test_what_a_closed_pipe_cuts_short_is_no_success(command, tmp_path):
    found = shell(f"set -o pipefail; mptify {command} 2>&1 | true", tmp_path)
    assert found.returncode == 1
    assert not found.stderr
    assert not list(tmp_path.glob("runs/*/summary.json"))


def test_a_bad_call_without_error_output_still_has_its_exit_code(tmp_path):
    for how in ("2>&-", "2> /dev/full"):
        assert shell(f"mptify inspect none.ticket {how}", tmp_path).returncode == 1


def little_room():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        "convert mptify:conv2 --standalone --out a.ticket",
        "convert timm:test_resnet --bits 1/1 --graph a.svg",
        f"{SEARCH} --out run",
    ],
)
def test_a_file_that_finds_no_room_is_told_in_one_line_and_leaves_no_part(command, tmp_path):
    found = shell(f"mptify {command}", tmp_path, preexec_fn=little_room)
    last = [line for line in found.stderr.splitlines() if line][-1]
    assert found.returncode == 1, found.stderr
    assert last.startswith("mptify: ")
    assert last.endswith("can't write there (File too large).")
    assert "Traceback" not in found.stderr
    assert not list(tmp_path.rglob("*.part"))
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".ticket", ".svg")]
