"""Bad calls of the command line: one line, exit code 1 or 2, no traceback, nothing half-written."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mptify.__main__ import main
from mptify.runtime.library import library
from tests.helpers.bad_files import contents, is_one_sentence

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ROOT = Path(__file__).parents[1]
COMMANDS = """
nothing
--nothing
searhc

convert
convert resnet81
convert timm:
convert :
convert ''
convert good.ticket
convert folder
convert mptify:conv2 --bits 2/2
convert mptify:conv2 --bits one
convert mptify:conv2 --prune 1
convert mptify:conv2 --prune -0.1
convert mptify:conv2 --prune nan
convert mptify:conv2 --prune much
convert mptify:conv2 --prune-overrides classifier
convert mptify:conv2 --prune-overrides classifier.1=2
convert mptify:conv2 --prune-overrides =0.5
convert mptify:conv2 --include nothing
convert mptify:conv2 --exclude '*'
convert mptify:conv2 --dense middle
convert mptify:conv2 --residual no
convert mptify:conv2 --bits 1/1 --bn insert
convert mptify:conv2 --scope global --prune-overrides classifier.1=0.5
convert mptify:conv2 --floor 2
convert mptify:conv2 --seed -1
convert mptify:conv2 --seed 1.5
convert mptify:conv2 --sign-width 0
convert mptify:conv2 --num-classes 0
convert mptify:conv2 --in-chans -3
convert mptify:conv2 --input-size 1
convert mptify:conv2 --out folder
convert mptify:conv2 --out nowhere/a.ticket
convert mptify:conv2 --out /proc/a.ticket
convert mptify:conv2 --graph folder
convert mptify:conv2 --graph nowhere/a.svg
convert mptify:conv2_x0
convert mptify:conv2 --init keep --bias some
convert mptify:conv2 --score-grad none

search --nothing 3
search resnet81 --data digits
search none.ticket
search text.ticket
search cut.ticket --data digits
search folder/
search mptify:conv2
search --data digits
search mptify:conv2 --data mnist
search mptify:conv2 --data imagefolder
search mptify:conv2 --data imagefolder:nowhere
search mptify:conv2 --data imagefolder:half
search mptify:conv2 --data imagefolder:broken
search mptify:conv2 --data arrays:words.npz
search mptify:conv2 --data arrays:floats.npz
search mptify:conv2 --data arrays:few.npz
search mptify:conv2 --data arrays:one.npz
search mptify:conv2 --data arrays:folder
search mptify:conv2 --data arrays:notes.txt
search mptify:conv2 --data timm:nothing:photos
search mptify:conv2 --data timm:
search mptify:conv2 --data cifar10:folder
search --set lr
search --set lr=
search --set =3
search --set lr=fast
search --set learning_rate=1
search --set epochs=0
search --set epochs=1.5
search --set ticket.prune=1
search --set ticket=3
search --set data.crop=8
search --set data.size=32
search --set batch=1
search --set precision=fp8
search --set precision=fp16
search --set optimizer=lion
search --set warmup=99
search --set data.train_images=1
search --set data.holdout=9999
search --set trackers=nothing
search --set start=nowhere
search --set a.b.c=1
search --set model.name=3
search --set ticket.bits=32/32
search --set threads=0
search --threads 0
search --recipe nothing
search --recipe bad.yaml
search --recipe list.yaml
search --recipe twice.yaml
search --recipe typo.yaml
search --recipe binary.yaml
search --recipe folder
search --recipe none.yaml
search --recipe good.ticket
search --out .
search --out run
search --out notes.txt
search --out notes.txt/run
search --out /proc/run
search --resume
search --resume --out folder
search --resume --out torn
search --resume --set lr=1
search --resume --out notes.txt
search good.ticket --data imagefolder:photos --set data.size=8
search nameless.ticket --data digits
search plain.ticket --data digits

recipes a b
recipes nothing
recipes bad.yaml
recipes folder

sweep nothing
sweep lineless.yaml
sweep axes.yaml
sweep bad.yaml
sweep folder
sweep width_small --set lr
sweep width_small --jobs 0

plot
plot nowhere
plot folder
plot rows.csv
plot results.csv
plot results.csv --x lr
plot waiting.csv --x lr
plot results.csv --x nothing
plot results.csv --x lr --out a.bmp
plot notes.txt

eval
eval none.ticket
eval text.ticket
eval cut.ticket
eval flipped.ticket
eval empty.ticket
eval folder
eval plain.ticket
eval good.ticket --data nothing
eval good.ticket --data imagefolder:photos
eval good.ticket --data arrays:many.npz
eval good.ticket --device nothing
eval good.ticket --device cuda:99
eval good.ticket --batch 0
eval good.ticket --set size
eval good.ticket --set nothing=3
eval odd_recipe.ticket
eval odd_input.ticket --data imagefolder:photos
eval nameless.ticket --data digits

report
report nowhere
report folder
report text.ticket
report notes.txt
report run
report good.ticket --out folder
report good.ticket --out notes.txt
report good.ticket --out nowhere/a.html
report good.ticket --device nothing
report good.ticket --images 0

predict good.ticket
predict none.ticket picture.png
predict text.ticket picture.png
predict good.ticket none.png
predict good.ticket folder
predict good.ticket notes.txt
predict good.ticket picture.png --top 0
predict good.ticket picture.png --runtime fast
predict nameless.ticket picture.png
predict cut.packed picture.png
predict good.packed picture.png --runtime float
predict odd_shape.ticket picture.png
predict odd_input.ticket picture.png

export good.ticket
export none.ticket --to onnx
export good.ticket --to torchscript
export good.ticket --to packed --out folder
export binary.ticket --to dense
export good.ticket --to dense --out folder
export good.ticket --to dense --out nowhere/a
export nameless.ticket --to dense
export cut.ticket --to dense
export good.packed --to dense
export good.ticket --to packed --activation-bits 4
export good.ticket --to packed --activation-bits eight
export good.ticket --to onnx --activation-bits 8
export good.ticket --to packed --data digits
export good.ticket --to packed --set size=8
export good.ticket --to packed --activation-bits 8 --data nothing
export good.ticket --to packed --activation-bits 8 --data imagefolder:photos
export good.ticket --to packed --activation-bits 8 --set nothing=3
export binary.ticket --to packed --activation-bits 8
export odd_recipe.ticket --to packed --activation-bits 8
export folder --to dense

inspect
inspect none.ticket
inspect text.ticket
inspect cut.ticket
inspect flipped.ticket
inspect empty.ticket
inspect folder
inspect good.ticket --png folder
inspect good.ticket --png nowhere/a.png
inspect good.packed
inspect picture.png

verify
verify none.ticket
verify text.ticket
verify cut.ticket
verify flipped.ticket
verify folder
verify good.packed

diff good.ticket
diff good.ticket none.ticket
diff good.ticket text.ticket
diff good.ticket plain.ticket
diff good.ticket folder

card
card none.ticket
card text.ticket
card folder
card good.ticket --out notes.txt
card good.ticket --out folder
card good.ticket --out nowhere/README.md
card good.ticket --license ''
card good.ticket --dataset imagefolder:photos

zoo
zoo --filter nothing*
zoo --all --jobs 0
zoo --filter timm:test_vit --rows folder
zoo --filter timm:test_vit --table nowhere/a.md
zoo --filter timm:test_vit --rows /proc/rows.jsonl
zoo --filter timm:test_vit --rows rows.jsonl

theory --depth 0
theory --width 0
theory --epsilon 0
theory --epsilon 2
theory --delta 1
theory --target large
theory --seeds -1
theory --sparsity 99
theory --inputs 0
theory --points -1 --depth 1

bench nothing
bench surgery --rounds 0
bench surgery --rounds x
bench inference resnet81
bench inference none.ticket
bench inference text.ticket
bench inference resnet18 --bits 1/3
bench inference folder
bench layers --prune 2
bench layers --bits 3/1
bench layers --threads 0
bench prune resnet81
bench ticket --rounds 0
bench search --batch 0
bench prune mptify:conv2 --plot folder
"""
COMMANDS = [line for line in COMMANDS.splitlines() if line]
IN_PROCESSES_OF_THEIR_OWN = [
    "nothing",
    "convert mptify:conv2 --input-size 1",
    "search --set learning_rate=1",
    "search --out notes.txt/run",
    "eval none.ticket --batch x",
    "inspect text.ticket",
]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_bad_call_is_told_in_one_line_and_leaves_nothing(arguments, here, monkeypatch, capsys):
    if "packed" in arguments and library is None:
        pytest.skip("this machine has no C++ compiler")
    before = contents(here)
    monkeypatch.setattr(sys, "argv", ["mptify", *shlex.split(arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code in (1, 2), said
    assert said.err.startswith("mptify")
    assert is_one_sentence(said.err.removesuffix("\n")), said.err
    assert not said.out
    assert contents(here) == before


@pytest.mark.parametrize("arguments", IN_PROCESSES_OF_THEIR_OWN)
def test_the_same_holds_in_a_process_of_its_own(arguments, here):
    before = contents(here)
    command = [sys.executable, "-m", "mptify", *shlex.split(arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode in (1, 2)
    assert not found.stdout
    assert is_one_sentence(found.stderr.removesuffix("\n")), found.stderr
    assert contents(here) == before


def test_every_command_is_called_wrongly():
    from typer.main import get_command

    from mptify.cli import app

    assert {shlex.split(line)[0] for line in COMMANDS} >= set(get_command(app).commands)
