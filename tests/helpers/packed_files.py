"""Packed files, right ones and changed ones."""

import json

import safetensors.torch
import torch

import mptify
from mptify.export import export
from mptify.models import registry
from mptify.runtime import packed_file as packed_files
from mptify.ticket.codec import as_json


def fill(name, value):
    return lambda description, tensors: tensors[name].fill_(value)


def fill_one(name, place, value):
    return lambda description, tensors: tensors[name].__setitem__(place, value)


def packed_file(name, folder, bits="1/1", exporting=None, **settings):
    """A ticket of a network whose norms have seen images, and the packed file of it."""
    entry = registry.resolve(name)
    network = registry.build(entry, num_classes=7)
    ticketed = mptify.transform(network, bits=bits, prune=0.9, **settings).train()
    x = (registry.example_inputs(entry, network)[0] * 8).round() / 8
    with torch.no_grad():
        ticketed(x)
    notes = {
        "labels": list("abcdefg"),
        "input": {"shape": list(x.shape[1:]), "mean": [0.5] * 3, "std": [0.25] * 3},
    }
    mptify.save(
        ticketed.eval(), folder / "a.ticket", name, arguments={"num_classes": 7}, notes=notes
    )
    export(folder / "a.ticket", "packed", folder / "a.packed", **exporting or {})
    return folder / "a.packed", x[:2]


def rewritten(path, to, change):
    """A file with a right digest, whose description or tensors were changed."""
    file = packed_files.open_packed(path)
    description, tensors = (
        json.loads(json.dumps(file.description)),
        {name: tensor.clone() for name, tensor in file.tensors.items()},
    )
    change(description, tensors)
    description["sha256"] = packed_files._digest(description, tensors)
    to.write_bytes(safetensors.torch.save(tensors, {packed_files.KEY: as_json(description)}))
    return to


def set_in(*path):
    *inner, value = path

    def change(description, tensors):
        at = description
        for key in inner[:-1]:
            at = at[key]
        at[inner[-1]] = value

    return change
