"""A search that is killed ten times and goes on each time: `python -m tests.training.killed FOLDER SEED`.

Each life is a fork of this process, which has imported everything and started no thread, so that lives are short.
Prints how many of the kills fell into an epoch's middle, and how many left a half-written file behind.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import accelerate  # noqa: F401
import matplotlib.figure  # noqa: F401
import sklearn.datasets

from mptify.config import make_recipe
from mptify.models import registry
from mptify.recipe_files import find_recipe, with_settings
from mptify.training import search
from mptify.training.run_folder import Run
from mptify.training.setup import architecture_of, build_network
from mptify.training.sources import load_data

KILLS = 10
CHANGES = [
    "epochs=4",
    "checkpoint_steps=2",
    "batch=32",
    "baseline=null",
    "data.train_images=600",
    "ema=0.9",
    "ticket.bits=1/1",
    "ticket.bn=keep",
]


sklearn.datasets.load_digits()  # here, and not in every life


def life(folder, resume):
    recipe = make_recipe(with_settings(find_recipe("digits")[0], CHANGES))
    train, val = load_data(recipe.data)
    built = architecture_of(registry.resolve(recipe.model), train)
    search(
        build_network(built, recipe),
        train,
        val,
        recipe,
        out=folder,
        resume=resume,
        architecture=built,
    )


def in_a_process_of_its_own(folder, resume):
    process = os.fork()
    if process:
        return process
    try:
        life(folder, resume)
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    sys.stderr.flush()
    os._exit(code)


def main():
    folder, rng = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    _, status = os.waitpid(in_a_process_of_its_own(folder / "whole", False), 0)
    assert os.WEXITSTATUS(status) == 0
    parts, within, torn = folder / "parts", 0, 0
    kills = 0
    while kills < KILLS:
        before = stamp(parts)
        process = in_a_process_of_its_own(parts, (parts / "recipe.yaml").exists())
        wait_until(
            lambda before=before: stamp(parts) != before, process
        )  # something new was saved in this life, so that the run gets on
        if kills % 2:  # while a file is being written
            wait_until(lambda: list(parts.glob(".mptify-*.part")), process)
        else:
            time.sleep(rng.random() * 0.15)
        os.kill(process, signal.SIGKILL)
        require_killed(os.waitpid(process, 0)[1])
        kills += 1
        torn += bool(list(parts.glob(".mptify-*.part")))
        found = Run(parts).read_checkpoint()
        within += found is not None and found[1]["step"] > 0
    _, status = os.waitpid(in_a_process_of_its_own(parts, True), 0)
    assert os.WEXITSTATUS(status) == 0
    print(f"{KILLS} kills, {within} within an epoch, {torn} while writing")


def wait_until(happened, process):
    while not happened():
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            require_killed(status)
        time.sleep(0.0002)


def require_killed(status):
    if os.WIFEXITED(status):
        raise SystemExit(
            f"the run ended (code {os.WEXITSTATUS(status)}) before it was killed {KILLS} times"
        )


def stamp(folder):
    path = folder / "checkpoint.safetensors"
    return path.stat().st_mtime_ns if path.exists() else 0


if __name__ == "__main__":
    main()
