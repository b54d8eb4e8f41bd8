"""Wrong arguments in Python: an MptifyError of one sentence each, and nothing half-written."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import mptify
from mptify.export import export
from mptify.models import conv2
from mptify.runtime.library import library
from tests.helpers.bad_files import SMALL, contents, is_one_sentence, small

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PIXELS, LABELS = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 10
DATA = (PIXELS, LABELS)


class Pairs(Dataset):
    def __init__(self, item):
        self.item = item

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.item


def searched(model=None, train=DATA, val=DATA, config=None, **options):
    model = conv2(**SMALL) if model is None else model
    return mptify.search(model, train, val, {"epochs": 1} if config is None else config, **options)


def transformed(**settings):
    return mptify.transform(conv2(), **settings)


def saved(architecture=None, **options):
    return mptify.save(small(), "a.ticket", architecture, **options)


def packed(**options):
    return mptify.pack(small(), image(1, 1, 8, 8), **options)


def deck_in_training():
    return mptify.Ensemble(mptify.load("good.ticket").train(), ["good.ticket"])


def image(*shape):
    return torch.zeros(shape)


CALLS = {
    "transform: no setting of that name": lambda: transformed(sparsity=0.5),
    "transform: prune of 1": lambda: transformed(prune=1),
    "transform: prune that is a word": lambda: transformed(prune="half"),
    "transform: no prune": lambda: transformed(prune=None),
    "transform: bits that are none": lambda: transformed(bits="3/3"),
    "transform: bits that are a number": lambda: transformed(bits=1),
    "transform: a pattern that matches nothing": lambda: transformed(include="nothing*"),
    "transform: patterns that are numbers": lambda: transformed(exclude=[1, 2]),
    "transform: everything excluded": lambda: transformed(exclude="*"),
    "transform: nothing to convert": lambda: mptify.transform(nn.ReLU()),
    "transform: overrides that are no mapping": lambda: transformed(prune_overrides=[0.5]),
    "transform: an override of nothing": lambda: transformed(prune_overrides={"nothing": 0.5}),
    "transform: overrides, globally": lambda: transformed(
        scope="global", prune_overrides={"*": 0.5}
    ),
    "transform: bn of a binary network": lambda: transformed(bits="1/1", bn="insert"),
    "transform: a negative seed": lambda: transformed(seed=-1),
    "transform: a seed that is too large": lambda: transformed(seed=2**64),
    "transform: a ticket model": lambda: mptify.transform(small()),
    "transform: an unknown name": lambda: mptify.transform("resnet81"),
    "transform: no model": lambda: mptify.transform(None),
    "transform: a class": lambda: mptify.transform(nn.Linear),
    "transform: a state dict": lambda: mptify.transform(conv2().state_dict()),
    "plan: no setting of that name": lambda: mptify.plan(conv2(), sparsity=0.5),
    "plan: bits that are none": lambda: mptify.plan(conv2(), bits="1/3"),
    "plan: nothing to convert": lambda: mptify.plan(nn.ReLU()),
    "plan: an unknown name": lambda: mptify.plan("resnet81"),
    "plan: no model": lambda: mptify.plan(None),
    "report: a dense model": lambda: mptify.summary(conv2()),
    "report: a name": lambda: mptify.summary("resnet18"),
    "report: no model": lambda: mptify.summary(None),
    "register: no class": lambda: mptify.register(nn.Bilinear(2, 2, 2)),
    "register: no function": lambda: mptify.register(nn.Bilinear)(3),
    "save: a dense model": lambda: mptify.save(conv2(), "a.ticket"),
    "save: a folder": lambda: mptify.save(small(), "folder"),
    "save: a folder that is not there": lambda: mptify.save(small(), "nowhere/a.ticket"),
    "save: a place where nothing can be written": lambda: mptify.save(small(), "/proc/a.ticket"),
    "save: a name that no registry knows": lambda: saved("resnet81"),
    "save: notes that JSON can't say": lambda: saved(notes={"a": object()}),
    "save: notes that are no mapping": lambda: saved(notes=[1]),
    "save: no model": lambda: mptify.save(None, "a.ticket"),
    "save: a path for a model": lambda: mptify.save("a.ticket", small()),
    "save: no path": lambda: mptify.save(small(), None),
    "save: a number for a path": lambda: mptify.save(small(), 3),
    "save: a number for a name": lambda: saved(3),
    "save: another network's name": lambda: saved("timm:test_vit"),
    "save: no argument of a network's": lambda: saved("mptify:conv2", arguments={"depth": 3}),
    "save: arguments that are no mapping": lambda: saved("mptify:conv2", arguments=3),
    "load: no file": lambda: mptify.load("none.ticket"),
    "load: text": lambda: mptify.load("text.ticket"),
    "load: half a file": lambda: mptify.load("cut.ticket"),
    "load: a flipped bit": lambda: mptify.load("flipped.ticket"),
    "load: an empty file": lambda: mptify.load("empty.ticket"),
    "load: a folder": lambda: mptify.load("folder"),
    "load: a picture": lambda: mptify.load("picture.png"),
    "load: a network that no registry knows": lambda: mptify.load("nameless.ticket"),
    "load: into another network": lambda: mptify.load("good.ticket", nn.Linear(3, 4)),
    "load: into a string": lambda: mptify.load("good.ticket", "conv2"),
    "load: into another ticket model": lambda: mptify.load("good.ticket", small("1/1")),
    "load: a runtime that is none": lambda: mptify.load("good.ticket", runtime="fast"),
    "load: half a packed file": lambda: mptify.load("cut.packed"),
    "load: a packed file as float": lambda: mptify.load("good.packed", runtime="float"),
    "load: a packed file into a model": lambda: mptify.load("good.packed", conv2(**SMALL)),
    "load: no path": lambda: mptify.load(None),
    "load: a number": lambda: mptify.load(3),
    "load: a device that is none": lambda: mptify.load("good.ticket", device="nothing"),
    "load: a device that is not there": lambda: mptify.load("good.ticket", device="cuda:99"),
    "pack: other activation bits": lambda: packed(activation_bits=4, calibrate=image(2, 1, 8, 8)),
    "pack: activation bits that are a word": lambda: packed(activation_bits="8"),
    "pack: activation bits without images": lambda: packed(activation_bits=8),
    "pack: images without activation bits": lambda: packed(calibrate=image(2, 1, 8, 8)),
    "pack: no images": lambda: packed(activation_bits=8, calibrate=[]),
    "pack: images of another network": lambda: packed(
        activation_bits=8, calibrate=image(2, 3, 8, 8)
    ),
    "pack: images that are words": lambda: packed(activation_bits=8, calibrate=["cat"]),
    "pack: images that are a path": lambda: packed(activation_bits=8, calibrate="photos"),
    "pack: a ticket of few-bit activations": lambda: mptify.pack(
        small("1/8"), activation_bits=8, calibrate=image(2, 1, 8, 8)
    ),
    "pack: a packed program": lambda: mptify.pack(
        mptify.load("good.packed"), activation_bits=8, calibrate=image(2, 1, 8, 8)
    ),
    "export: few bits for another target": lambda: export(
        "good.ticket", "dense", activation_bits=8, calibrate=image(2, 1, 8, 8)
    ),
    "export: images without bits, packed": lambda: export(
        "good.ticket", "packed", calibrate=image(2, 1, 8, 8)
    ),
    "read: no file": lambda: mptify.read("none.ticket"),
    "read: text": lambda: mptify.read("text.ticket"),
    "read: a folder": lambda: mptify.read("folder"),
    "read: a packed file": lambda: mptify.read("good.packed"),
    "read: no path": lambda: mptify.read(None),
    "pack: no model": lambda: mptify.pack(None),
    "pack: a path": lambda: mptify.pack("good.ticket"),
    "pack: a dense model": lambda: mptify.pack(conv2()),
    "pack: an example of another shape": lambda: mptify.pack(small("1/1"), image(1, 3, 9, 9)),
    "pack: an example that is none": lambda: mptify.pack(small("1/1"), "image"),
    "swap_: another network": lambda: mptify.swap_(small(), mptify.read("plain.ticket")),
    "swap_: other bits": lambda: mptify.swap_(small(), mptify.read("binary.ticket")),
    "swap_: a file that is not there": lambda: mptify.swap_(small(), "none.ticket"),
    "swap_: no ticket": lambda: mptify.swap_(small(), None),
    "swap_: a dense model": lambda: mptify.swap_(conv2(**SMALL), mptify.read("good.ticket")),
    "swap_: no model": lambda: mptify.swap_("good.ticket", mptify.read("good.ticket")),
    "ticket_of: a dense model": lambda: mptify.ticket_of(conv2()),
    "ticket_of: notes that JSON can't say": lambda: mptify.ticket_of(small(), notes={"a": {1, 2}}),
    "ticket_of: no model": lambda: mptify.ticket_of(None),
    "ticket_of: a path": lambda: mptify.ticket_of("good.ticket"),
    "ticket_of: a name": lambda: mptify.ticket_of(small(), architecture="resnet18"),
    "Ensemble: no tickets": lambda: mptify.Ensemble(small(), []),
    "Ensemble: another network's": lambda: mptify.Ensemble(small(), ["plain.ticket"]),
    "Ensemble: a file that is not there": lambda: mptify.Ensemble(small(), ["none.ticket"]),
    "Ensemble: numbers": lambda: mptify.Ensemble(small(), [3]),
    "Ensemble: one path": lambda: mptify.Ensemble(small(), "good.ticket"),
    "Ensemble: nothing that can be gone through": lambda: mptify.Ensemble(small(), 3),
    "Ensemble: no model": lambda: mptify.Ensemble("good.ticket", ["good.ticket"]),
    "Ensemble: a dense model": lambda: mptify.Ensemble(conv2(**SMALL), ["good.ticket"]),
    "Ensemble: in training": lambda: deck_in_training()(image(1, 1, 8, 8)),
    "search: a name for a model": lambda: searched("resnet18"),
    "search: a class for a model": lambda: searched(nn.Linear),
    "search: a ticket for a model": lambda: searched(mptify.read("good.ticket")),
    "search: a loaded model": lambda: searched(mptify.load("good.ticket")),
    "search: a network for other images": lambda: searched(conv2()),
    "search: a network of fewer classes": lambda: searched(conv2(num_classes=3, **SMALL)),
    "search: a network that gives no classes": lambda: searched(nn.Sequential(nn.Conv2d(1, 4, 3))),
    "search: nothing to convert": lambda: searched(nn.Flatten()),
    "search: no data": lambda: searched(train=None),
    "search: a path for data": lambda: searched(train="photos"),
    "search: a tensor for data": lambda: searched(train=image(4, 1, 8, 8)),
    "search: an empty data set": lambda: searched(train=[]),
    "search: a loader": lambda: searched(train=DataLoader(Pairs((image(1, 8, 8), 0)))),
    "search: float images": lambda: searched(train=(PIXELS / 255.0, LABELS)),
    "search: float labels": lambda: searched(train=(PIXELS, LABELS / 2)),
    "search: negative labels": lambda: searched(train=(PIXELS, LABELS - 1)),
    "search: one-hot labels": lambda: searched(train=(PIXELS, np.eye(10)[LABELS])),
    "search: words for labels": lambda: searched(train=(PIXELS, ["cat", "dog"] * 20)),
    "search: no labels": lambda: searched(train=(PIXELS, None)),
    "search: too few labels": lambda: searched(train=(PIXELS, LABELS[:3])),
    "search: one class": lambda: searched(train=(PIXELS, LABELS * 0)),
    "search: other sizes to validate": lambda: searched(val=(PIXELS[:, :6], LABELS)),
    "search: items that are no pairs": lambda: searched(train=Pairs(image(1, 8, 8))),
    "search: items that are pictures": lambda: searched(train=Pairs((Image.new("L", (8, 8)), 0))),
    "search: items with words": lambda: searched(train=Pairs((image(1, 8, 8), "cat"))),
    "search: items with floats": lambda: searched(train=Pairs((image(1, 8, 8), 0.5))),
    "search: items without labels": lambda: searched(train=Pairs((image(1, 8, 8), None))),
    "search: one-hot items": lambda: searched(train=Pairs((image(1, 8, 8), torch.eye(3)[0]))),
    "search: settings that are a word": lambda: searched(config="fast"),
    "search: settings that are a list": lambda: searched(config=["fast"]),
    "search: no setting of that name": lambda: searched(config={"learning_rate": 0.1}),
    "search: a setting of the ticket": lambda: searched(config={"prune": 0.5}),
    "search: epochs that are a word": lambda: searched(config={"epochs": "two"}),
    "search: a batch that is too small": lambda: searched(config={"epochs": 1, "batch": 1}),
    "search: a ticket that is none": lambda: searched(config={"ticket": 3}),
    "search: bits of another method": lambda: searched(config={"ticket": {"bits": "32/32"}}),
    "search: a tracker that is not there": lambda: searched(config={"trackers": "nothing"}),
    "search: a folder that is not empty": lambda: searched(out="photos"),
    "search: a file for a folder": lambda: searched(out="notes.txt"),
    "search: a number for a folder": lambda: searched(out=3),
    "search: nothing to resume": lambda: searched(resume=True),
    "search: a folder without a run": lambda: searched(out="folder", resume=True),
    "search: a name that no registry knows": lambda: searched(architecture="resnet81"),
    "search: another network's name": lambda: searched(architecture="timm:test_vit"),
    "search: a number for a name": lambda: searched(architecture=18),
    "search: a callback that is none": lambda: searched(callbacks=print),
    "search: callbacks that are none": lambda: searched(callbacks=[print]),
    "search: workers below zero": lambda: searched(workers=-1),
    "search: workers that are a word": lambda: searched(workers="four"),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_wrong_argument_is_told_in_one_sentence(what, here):
    if "packed" in what and library is None:
        pytest.skip("this machine has no C++ compiler")
    before = contents(here)
    with pytest.raises(mptify.MptifyError) as caught:
        CALLS[what]()
    assert is_one_sentence(str(caught.value)), str(caught.value)
    assert contents(here) == before
