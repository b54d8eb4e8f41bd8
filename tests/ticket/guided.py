"""Coverage-guided fuzzing of the reader, for a machine with atheris: `python -m tests.ticket.guided -max_total_time=600`.

The first byte says what is tried: a whole file, a file whose digest is made to fit, or a mask alone.
"""

import sys

import atheris

with atheris.instrument_imports(include=["mptify.ticket"]):
    from mptify.ticket import codec as ticket_format
    from mptify.ticket import masks
    from mptify.ticket.codec import from_bytes, to_bytes

import numpy as np

from mptify.errors import MptifyError
from tests.helpers.tickets import TICKETS

SHAPES = [(16, 3, 3, 3), (48, 24, 3, 3), (1, 30_000), (10, 16), (7,), (1 << 21,), (33, 5)]
TRUE_DIGEST = ticket_format._digest


def try_one(data: bytes) -> None:
    if not data:
        return
    way, data = data[0] % 3, data[1:]
    try:
        if way == 0:
            found = from_bytes(
                data
            )  # it may be another ticket: the fuzzer sees what the digest is compared with, and forges it
            assert from_bytes(to_bytes(found)) == found
        elif way == 1:
            expected = []
            ticket_format._digest = lambda *given: _accept(expected, *given)
            try:
                found = from_bytes(data)
            finally:
                ticket_format._digest = TRUE_DIGEST
            to_bytes(found)
        elif len(data) > 3:
            shape, kept = SHAPES[data[0] % len(SHAPES)], int.from_bytes(data[1:3], "little")
            assert masks.decode(data[3:], shape, kept).sum() == kept
    except MptifyError:
        pass


class _Anything(str):
    def __ne__(self, other):
        return False

    def __eq__(self, other):
        return True

    __hash__ = str.__hash__


def _accept(expected, description, ticket):
    TRUE_DIGEST(description, ticket)
    return _Anything()


def seeds(folder):
    for name, ticket in TICKETS.items():
        for way in (0, 1):
            (folder / f"{name}_{way}").write_bytes(bytes([way]) + to_bytes(ticket))
    rng = np.random.RandomState(0)
    for index, shape in enumerate(SHAPES):
        for density in (
            0.05,
            np.linspace(0.01, 0.6, shape[0]).reshape(-1, *[1] * (len(shape) - 1)),
        ):
            mask = rng.random(shape) < density
            head = bytes([2, index]) + int(min(mask.sum(), 65535)).to_bytes(2, "little")
            (folder / f"mask_{index}_{np.ndim(density)}").write_bytes(head + masks.encode(mask))


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    corpus = Path(tempfile.mkdtemp())
    seeds(corpus)
    atheris.Setup([*sys.argv, str(corpus)], try_one)
    atheris.Fuzz()
