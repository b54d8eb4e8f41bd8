"""Programs as bytes for replay.cpp, which runs them under sanitizers and on emulated CPUs."""

import os
import struct
import subprocess
from pathlib import Path

import numpy as np
import torch

from mptify.runtime.library import library

REPLAY = Path(__file__).with_name("replay.cpp")
FLAGS = ["-std=c++17", "-pthread", "-ffp-contract=off", "-Wno-psabi", "-Wno-unknown-pragmas"]


def build(compiler, folder, *flags):
    target = Path(folder) / "replay"
    subprocess.run(
        [compiler, *FLAGS, *flags, str(REPLAY), "-o", str(target)], check=True, capture_output=True
    )
    return target


def numbers(*values):
    return struct.pack(f"<{len(values)}q", *values)


def tape(chain, inputs, cpu, threads, *, compiles=False):
    """A chain on some images, as bytes. If it `compiles`, layers on lanes run as machine code."""
    given = chain.readable(inputs)
    images, (builder, _) = len(given[0]), chain.program_for(given)
    steps = bytes(builder.steps())
    arrays = [
        *[(0, x.numel() * 4, 4 * x.stride(0), x.contiguous().numpy().tobytes()) for x in given],
        *[(2, images * form.bytes, form.bytes, b"") for form in builder.outputs],
        *[(1, size, 0, b"") for size in builder.workspace_sizes],
        *[(0, len(data := _bytes(array)), 0, data) for array in builder.constants],
    ]
    kernel = library.kernel_number("lanes_conv") if compiles else -1
    head = numbers(cpu, threads, images, kernel, len(builder.names)) + steps
    head += numbers(len(arrays))
    return head + b"".join(
        numbers(what, size, stride) + data for what, size, stride, data in arrays
    )


def _bytes(array):
    return (
        array.numpy() if isinstance(array, torch.Tensor) else np.ascontiguousarray(array)
    ).tobytes()


def replay(command, tapes):
    """What the program prints: all outputs, one after the other, as float32."""
    filled = {
        "ASAN_OPTIONS": "max_malloc_fill_size=1000000:malloc_fill_byte=255"
    }  # so that what was not written is no zero
    done = subprocess.run(
        command,
        input=numbers(len(tapes)) + b"".join(tapes),
        capture_output=True,
        check=False,
        env=os.environ | filled,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return torch.frombuffer(bytearray(done.stdout), dtype=torch.float32)
