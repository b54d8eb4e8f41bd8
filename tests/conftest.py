"""One thread per test process: the tests run in as many processes as there are cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# oneDNN takes AMX for granted where the processor has it, though some virtual machines forbid it: bfloat16 then dies.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch


@pytest.fixture(autouse=True)
def _known_random_state():
    torch.set_num_threads(1)
    torch.manual_seed(0)
