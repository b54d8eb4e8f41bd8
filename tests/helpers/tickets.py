"""Tickets of every kind."""

import dataclasses

import numpy as np

from mptify.config import make_config
from mptify.models.registry import Architecture
from mptify.nn import init
from mptify.ticket.codec import Ticket, TicketLayer


def layer(name, shape, density, seed=0, **options):
    mask = np.random.RandomState(seed).random(shape) < density
    mask.reshape(-1)[-1] = True
    return TicketLayer(name, mask, **options)


def small(**changes):
    rng = np.random.RandomState(5)
    rows = np.linspace(0.02, 0.7, 48)[:, None, None, None]
    layers = [
        layer("conv", (16, 3, 3, 3), 0.2, gain=0.125),
        layer("rows", (48, 24, 3, 3), np.broadcast_to(rows, (48, 24, 3, 3)), gain=0.3),
        layer("drift", (1, 30_000), np.linspace(0.01, 0.5, 30_000), gain=0.01),
        layer("Ünicode.head", (10, 16), 0.5, gain=1.0),
    ]
    floats = {
        "norm.running_mean": rng.standard_normal(16).astype("f4"),
        "norm.weight": np.ones(16, "f4"),
        "position": rng.standard_normal((1, 4, 3)).astype("f4"),
        "minus": np.full(3, -0.0, "f4"),
        "odd": np.array([np.nan, np.inf, -np.inf], "f4"),
        "all_nan": np.full(4, np.nan, "f4"),
        "nothing": np.zeros((0, 3), "f4"),
        "scalar": np.array(2.5, "f4"),
    }
    fields = {
        "config": make_config({"bits": "1/1", "prune": 0.8, "seed": 7}),
        "layers": {one.name: one for one in layers},
        "floats": floats,
        "architecture": Architecture("timm", "resnet18", {"num_classes": 10}),
        "notes": {"accuracy": 0.91, "by": "tests"},
    }
    return Ticket(**(fields | changes))


def with_survivors(ticket, **what):
    """The same with stored signs or values."""
    rng = np.random.RandomState(9)
    make = {
        "signs": lambda kept: rng.random(kept) < 0.5,
        "values": lambda kept: rng.standard_normal(kept).astype("f4"),
    }
    layers = {
        name: dataclasses.replace(one, **{kind: make[kind](one.kept) for kind in what})
        for name, one in ticket.layers.items()
    }
    return dataclasses.replace(ticket, layers=layers)


def searched():
    """Masks that follow the initial scores, as a search leaves them."""
    ticket = small()
    layers = {}
    for name, one in (ticket.layers | {"wide": layer("wide", (3, 70_001), 0.5)}).items():
        levels = np.concatenate(list(init.score_levels(7, name, one.mask.size)))
        noise = np.random.RandomState(3).random(one.mask.size) < 0.1
        layers[name] = dataclasses.replace(one, mask=((levels > 100) ^ noise).reshape(one.shape))
    return dataclasses.replace(ticket, layers=layers)


TICKETS = {
    "seed": small(),
    "searched": searched(),
    "signs": with_survivors(small(), signs=True),
    "values": with_survivors(
        small(config=make_config({"bits": "32/32", "init": "keep", "prune": 0.5})), values=True
    ),
    "no floats": small(floats={}),
    "float16": small(floats={"a": np.linspace(0, 1, 7).astype("f2")}),
    "float64": small(floats={"a": np.linspace(0, 1, 7)}, dtype="float64"),
    "no architecture": small(architecture=None),
}
