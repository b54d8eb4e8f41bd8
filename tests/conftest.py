"""One thread per test process: the tests run in as many processes as there are cores."""

import gc
import os
import shutil

os.environ.setdefault("OMP_NUM_THREADS", "1")
# oneDNN takes AMX for granted where the processor has it, though some virtual machines forbid it: bfloat16 then dies.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

from tests.helpers.bad_files import make_files


@pytest.fixture(autouse=True)
def _known_random_state():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _imports_are_no_garbage():
    """What is there before the first test need not be looked through again by every collection."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def process_group(tmp_path_factory):
    """A group of one process, which is what DistributedDataParallel needs to run at all."""
    meeting = tmp_path_factory.mktemp("group") / "meeting"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def materials(tmp_path_factory):
    """A folder of good and broken files for calls that must fail."""
    folder = tmp_path_factory.mktemp("materials")
    make_files(folder)
    return folder


@pytest.fixture
def here(materials, tmp_path, monkeypatch):
    """A copy of `materials` as the current folder."""
    shutil.copytree(materials, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"
