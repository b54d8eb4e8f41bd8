"""The picture is well-formed, complete and small, whatever the model."""

from __future__ import annotations

import re
from itertools import product
from xml.etree import ElementTree

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import mptify
from mptify.errors import MptifyError
from mptify.report.surgery_drawing import draw

SVG = "{http://www.w3.org/2000/svg}"
MODELS = [
    "resnet18",
    "vit_b_16",
    "convnext_tiny",
    "densenet121",
    "timm/vit_small_patch16_224",
    "timm/efficientnet_b0",
]


class Untraceable(nn.Module):
    """Control flow on values: what it calls is drawn part by part."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3))) if x.sum() > 0 else x


class Bare(nn.Module):
    """Hands parameters of its own, and those of a layer, to functions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.kernel = nn.Parameter(torch.empty(8, 8))
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        x = F.linear(F.linear(x, self.first.weight), self.kernel)
        return self.attention(x, x, x)[0] + x


def ticket_model(name: str, bits: str = "1/1", **settings) -> nn.Module:
    with torch.device("meta"):
        if name in ("untraceable", "bare"):
            model = Untraceable() if name == "untraceable" else Bare()
        elif name.startswith("timm/"):
            model = timm.create_model(name.removeprefix("timm/"))
        else:
            model = torchvision.models.get_model(name, weights=None)
    return mptify.transform(model, bits=bits, prune=0.75, **settings)


def boxes(svg: str, role: str) -> list[ElementTree.Element]:
    return [
        group for group in ElementTree.fromstring(svg).iter(f"{SVG}g") if group.get("class") == role
    ]


def count(svg: str, role: str) -> int:
    return sum(int(box.get("data-times")) for box in boxes(svg, role))


def texts(svg: str, **attributes: str) -> list[str]:
    found = ElementTree.fromstring(svg).iter(f"{SVG}text")
    return [
        "".join(text.itertext())
        for text in found
        if all(text.get(key) == value for key, value in attributes.items())
    ]


@pytest.mark.parametrize(
    ("name", "bits"),
    [*product([*MODELS, "untraceable", "bare"], ["1/1", "1/4", "1/32"]), ("swin_t", "1/32")],
)
def test_every_ticket_layer_is_drawn_once_or_counted_in_a_fold(name, bits):
    model = ticket_model(name, bits)
    svg = draw(model)
    assert count(svg, "ticket") == len(model.ticket_plan.layers)
    assert f"ticket layer ({len(model.ticket_plan.layers)})" in texts(svg, **{"class": "legend"})


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "timm/efficientnet_b0", "densenet121"])
def test_text_stays_in_its_box_and_boxes_do_not_overlap(name):
    rectangles, svg = [], draw(ticket_model(name))
    for role in ("ticket", "norm", "sign", "edge", "pool", "dense", "plain"):
        for box in boxes(svg, role):
            x, y, width, height = (
                float(box.find(f"{SVG}rect").get(key)) for key in ("x", "y", "width", "height")
            )
            rectangles.append((x, y, x + width, y + height))
            for text in box.iter(f"{SVG}text"):
                assert (
                    len(text.text) * 6.62 <= width
                )  # 11px in the widest of the usual monospace fonts
                assert y < float(text.get("y")) < y + height
    for number, (left, top, right, bottom) in enumerate(rectangles):
        assert not any(
            left < r and x < right and top < b and y < bottom for x, y, r, b in rectangles[:number]
        )


def test_equal_blocks_are_folded():
    assert "blocks.0…11 ×12" in texts(draw(ticket_model("timm/vit_small_patch16_224")))
    assert "encoder.layers.encoder_layer_0…11 ×12" in texts(draw(ticket_model("vit_b_16", "1/32")))
    headings = texts(draw(ticket_model("resnet18")), **{"font-weight": "bold"})
    assert "layer1.0…1 ×2" in headings
    assert {"layer2.0", "layer2.1"} <= set(headings)  # these differ


def test_each_edit_has_its_colour():
    svg = draw(ticket_model("resnet18"))
    assert [box.find(f"{SVG}text").text for box in boxes(svg, "pool")] == ["MaxPool2d, moved up"]
    assert count(svg, "sign") == 17
    assert count(svg, "edge") == count(svg, "norm") == 0
    svg = draw(ticket_model("vit_b_16"))
    assert (count(svg, "sign"), count(svg, "edge"), count(svg, "norm")) == (12, 36, 48)
    svg = draw(ticket_model("resnet18", "1/32"))
    assert count(svg, "sign") == count(svg, "edge") == count(svg, "norm") == count(svg, "pool") == 0


def test_dense_layers_say_why():
    (box,) = boxes(draw(ticket_model("resnet18", dense="first")), "dense")
    assert [text.text for text in box.iter(f"{SVG}text")] == [
        "conv1",
        "Conv2d 64×3×7×7",
        "asked: first layer",
    ]


def test_the_title_names_model_and_settings():
    svg = draw(ticket_model("resnet18"))
    assert "ResNet → 1/1 ticket, prune 0.75" in texts(svg)
    assert "21 ticket layers keep 2.92 M of 11.7 M weights; no layer stays dense" in texts(svg)


def test_code_that_cannot_be_traced_is_drawn_dashed():
    assert "stroke-dasharray" in draw(ticket_model("untraceable"))
    assert "stroke-dasharray" not in draw(ticket_model("resnet18"))


def test_names_are_escaped():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module('a<b&"c"', nn.Linear(4, 4))
            self.last = nn.Linear(4, 2)

        def forward(self, x):
            return self.last(getattr(self, 'a<b&"c"')(x))

    Odd.__name__ = "Odd<T>"
    svg = draw(mptify.transform(Odd(), bits="1/32"))
    assert 'a<b&"c"' in texts(svg)
    assert any(text.startswith("Odd<T> →") for text in texts(svg))


def test_the_same_model_gives_the_same_text_and_stays_as_it_is():
    model = ticket_model("resnet18", "1/32")
    before = list(model.state_dict()), repr(type(model.conv1))
    assert draw(model) == draw(model) == draw(ticket_model("resnet18", "1/32"))
    assert before == (list(model.state_dict()), repr(type(model.conv1)))


def test_it_needs_nothing_from_outside():
    assert not re.search(r"href|<image|<script|@import|url\((?!#)", draw(ticket_model("vit_b_16")))


def test_an_ordinary_model_is_refused():
    with pytest.raises(
        MptifyError,
        match=r"takes a ticket model, as mptify.transform\(\) returns it; this Linear has no plan",
    ):
        draw(nn.Linear(2, 2))
