"""A folder of files for bad calls: good ones, damaged ones, and folders where files should be."""

import shutil
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import nn

import mptify
from mptify.config import make_recipe
from mptify.export import export
from mptify.models import conv2
from mptify.recipe_files import to_yaml
from mptify.runtime.library import library
from mptify.ticket.state import write

SMALL = {"in_chans": 1, "input_size": 8}
NOTES = {
    "labels": list("0123456789"),
    "input": {"shape": [1, 8, 8], "mean": [0.3], "std": [0.3]},
    "data": "digits",
    "recipe": {"model": "mptify:conv2", "data": {"source": "digits"}},
}


def small(bits="1/32", **settings):
    return mptify.transform(conv2(**SMALL), bits=bits, **settings).eval()


def contents(folder):
    """Every file and folder below, and what the files hold."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def is_one_sentence(text):
    """One line, that ends as sentences do."""
    return "\n" not in text and text.endswith((".", "?")) and len(text) < 1000


def make_files(folder):
    """Good files, damaged ones, and folders where files should be."""
    torch.manual_seed(0)
    named = {"architecture": "mptify:conv2", "arguments": SMALL, "notes": NOTES}
    mptify.save(small(), folder / "good.ticket", **named)
    mptify.save(small("1/1"), folder / "binary.ticket", **named)
    mptify.save(mptify.transform(conv2(), bits="1/32"), folder / "plain.ticket", "mptify:conv2")
    nameless = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2))
    mptify.save(mptify.transform(nameless), folder / "nameless.ticket")
    odd = mptify.read(folder / "good.ticket")
    for name, notes in (
        ("recipe", {"recipe": {"model": 3, "data": {"source": 4}}}),
        ("input", {"input": {"shape": "large", "mean": None}}),
        ("shape", {"input": {"shape": [-1, "a", None]}}),
    ):
        write(replace(odd, notes=NOTES | notes), folder / f"odd_{name}.ticket")
    data = (folder / "good.ticket").read_bytes()
    (folder / "cut.ticket").write_bytes(data[: len(data) // 2])
    (folder / "flipped.ticket").write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    (folder / "text.ticket").write_text("hello")
    (folder / "empty.ticket").write_bytes(b"")
    if library is not None:
        export(folder / "binary.ticket", "packed", folder / "good.packed")
        packed = (folder / "good.packed").read_bytes()
        (folder / "cut.packed").write_bytes(packed[:-100])
    (folder / "folder").mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "bad.yaml").write_text("model: [conv2\n")
    (folder / "list.yaml").write_text("- a\n- b\n")
    (folder / "twice.yaml").write_text("lr: 1\nlr: 2\n")
    (folder / "typo.yaml").write_text("model: mptify:conv2\ndata: digits\nlearning_rate: 0.1\n")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "lineless.yaml").write_text("lines: []\n")
    (folder / "axes.yaml").write_text("lines: [{name: a, axes: [b]}]\ngrid: {lr: [1]}\n")
    (folder / "rows.csv").write_text("a,b\n1,2\n")
    (folder / "results.csv").write_text("run,line,lr,seed,state,top1\nx,a,1,0,done,fast\n")
    (folder / "waiting.csv").write_text("run,line,lr,seed,state,top1\nx,a,1,0,waiting,\n")
    (folder / "rows.jsonl").write_text("no json\n")
    x, y = np.zeros((20, 8, 8), np.uint8), np.arange(20) % 10
    np.savez(folder / "words.npz", x_train=x, y_train=np.array(["a", "b"] * 10), x_test=x, y_test=y)
    np.savez(folder / "floats.npz", x_train=x.astype(float), y_train=y, x_test=x, y_test=y)
    np.savez(folder / "few.npz", x_train=x)
    np.savez(folder / "one.npz", x_train=x, y_train=y * 0, x_test=x, y_test=y * 0)
    np.savez(folder / "many.npz", x_train=x, y_train=y + 10, x_test=x, y_test=y + 10)
    for part in ("train", "val"):
        for label in ("cat", "dog"):
            (folder / "photos" / part / label).mkdir(parents=True)
            Image.new("L", (8, 8), 100).save(folder / "photos" / part / label / "a.png")
    shutil.copytree(folder / "photos", folder / "broken")
    (folder / "broken/train/cat/b.png").write_text("no picture")
    (folder / "half/train/cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "picture.png")
    (folder / "run").mkdir()
    (folder / "run/recipe.yaml").write_text("model: mptify:conv2\ndata: digits\n")
    (folder / "run/summary.json").write_text("{}")
    (folder / "torn").mkdir()
    recipe = make_recipe({"model": "mptify:conv2", "data": "digits"}, "")
    (folder / "torn/recipe.yaml").write_text(to_yaml(recipe))
    (folder / "torn/checkpoint.safetensors").write_bytes(b"nothing")
