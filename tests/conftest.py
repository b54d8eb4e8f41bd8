"""One thread per test process: the tests run in as many processes as there are cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _known_random_state():
    torch.set_num_threads(1)
    torch.manual_seed(0)
