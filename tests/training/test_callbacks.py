"""Callbacks see a search, may change its model, and survive a stop."""

import os
import signal

import pytest
import torch

import mptify
from mptify.errors import MptifyError
from mptify.models import conv2

IMAGES = torch.randint(
    0, 256, (60, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
DATA = (IMAGES, torch.arange(60) % 10)
CONFIG = {
    "epochs": 3,
    "batch": 20,
    "warmup": 0,
    "checkpoint_steps": 1,
    "ticket": {"bits": "1/32", "prune": 0.5},
}


def search(**options):
    torch.manual_seed(0)
    return mptify.search(conv2(in_chans=1, input_size=8, width=0.25), DATA, DATA, CONFIG, **options)


class Record(mptify.Callback):
    def __init__(self):
        self.calls = []

    def on_search_begin(self, search):
        self.calls.append(("begin", search.epoch, search.step, search.steps_per_epoch))

    def on_step_end(self, search, metrics):
        self.calls.append(("step", search.epoch, search.step, metrics.images))

    def on_epoch_end(self, search, row):
        assert search.rows[-1] is row
        self.calls.append(("epoch", search.epoch, search.step, row["epoch"]))

    def on_search_end(self, search):
        self.calls.append(("end", search.epoch, search.step, search.config.epochs))


class Flip(mptify.Callback):
    """Every second step turns the largest score of each layer around: a method that changes the model, with state of its own."""

    def __init__(self):
        self.steps = 0

    def on_step_end(self, search, metrics):
        self.steps += 1
        if self.steps % 2 == 0:
            with torch.no_grad():
                for layer in mptify.ticket_layers(search.model).values():
                    layer.scores.view(-1)[layer.scores.abs().argmax()].mul_(-0.01)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Stop(mptify.Callback):
    def on_step_end(self, search, metrics):
        if (search.epoch, search.step) == (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_callback_is_called_in_order():
    record = Record()
    search(callbacks=[record])
    epoch = [
        [("step", e, s, 20 * s) for s in (1, 2, 3)] + [("epoch", e + 1, 0, e + 1)] for e in range(3)
    ]
    assert record.calls == [("begin", 0, 0, 3), *epoch[0], *epoch[1], *epoch[2], ("end", 3, 0, 3)]


def test_the_end_is_called_when_a_search_fails():
    class Fail(mptify.Callback):
        def on_step_end(self, search, metrics):
            raise RuntimeError("stop here")

    record = Record()
    with pytest.raises(RuntimeError, match="stop here"):
        search(callbacks=[record, Fail()])
    assert record.calls[-1][0] == "end"


def test_a_callback_can_change_the_model_and_is_resumed_exactly(tmp_path):
    plain = search(out=tmp_path / "plain")
    whole = search(out=tmp_path / "whole", callbacks=[Flip()])
    assert plain.rows[-1]["masks"] != whole.rows[-1]["masks"]
    assert not search(out=tmp_path / "parts", callbacks=[Flip(), Stop()]).finished
    search(out=tmp_path / "parts", resume=True, callbacks=[Flip()])
    for file in ("last.ticket", "best.ticket"):
        assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_a_search_is_not_resumed_without_the_callback_that_keeps_state(tmp_path):
    search(out=tmp_path / "run", callbacks=[Flip(), Stop()])
    with pytest.raises(MptifyError, match="started with the callback Flip, which has state"):
        search(out=tmp_path / "run", resume=True)
