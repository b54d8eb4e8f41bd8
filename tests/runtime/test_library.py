"""The library describes itself, and Python refuses one that does not fit."""

import ctypes
import subprocess

import pytest

from mptify.errors import MptifyError
from mptify.registry import kernels
from mptify.runtime import library as module
from mptify.runtime.kernel import NativeKernel
from mptify.runtime.library import Library, library

pytestmark = pytest.mark.skipif(library is None, reason="this machine has no C++ compiler")
STUB = """
extern "C" {
const char* mptify_packed_layout() { return LAYOUT; }
int mptify_packed_kernels() { return 0; }
const char* mptify_packed_kernel_name(int) { return ""; }
int mptify_packed_cpus() { return 0; }
const char* mptify_packed_cpu_name(int) { return ""; }
int mptify_packed_word_bytes() { return 16; }
void mptify_packed_run() {}
}
"""


def layout():
    """What the library says of its structures."""
    code = ctypes.CDLL(str(library.path))
    code.mptify_packed_layout.restype = ctypes.c_char_p
    return code.mptify_packed_layout().decode()


def built(folder, source):
    (folder / "stub.cpp").write_text(source)
    command = ["g++", "-shared", "-fPIC", str(folder / "stub.cpp"), "-o", str(folder / "stub.so")]
    subprocess.run(command, check=True)
    return folder / "stub.so"


def with_layout(folder, text):
    lines = "".join(f'"{line}\\n"' for line in text.splitlines())
    return built(folder, f"#define LAYOUT {lines}\n{STUB}")


def test_the_structures_are_those_that_the_library_describes(tmp_path):
    again = Library(with_layout(tmp_path, layout()))
    assert ctypes.sizeof(again.Step) == ctypes.sizeof(library.Step)
    assert again.Step.output.offset == library.Step.output.offset
    assert again.signature != library.signature  # it has no kernels


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("number filters", "number outputs", "its Step differs in filters, outputs"),
        ("number channels 0\n", "", "its ConvShape differs in channels"),
        ("buffer table ", "buffer table 1", "its Step lies in memory in another way"),
        ("struct ConvShape 1", "struct ConvShape 2", "its ConvShape lies in memory in another way"),
    ],
)
def test_a_library_with_other_structures_is_refused(tmp_path, old, new, why):
    assert old in layout()
    with pytest.raises(
        MptifyError,
        match=rf"stub.so was built from other sources .*: {why}\. Install mptify again",
    ):
        Library(with_layout(tmp_path, layout().replace(old, new)))


def test_a_library_that_does_not_describe_itself_is_refused(tmp_path):
    with pytest.raises(MptifyError, match="it does not describe its structures"):
        Library(built(tmp_path, 'extern "C" int mptify_packed_edition() { return 13; }'))


def test_without_a_library_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "library_of", lambda source: tmp_path / "none.so")
    assert module._load() is None


def test_every_native_kernel_is_in_the_library():
    names = {name for name, kernel in kernels.all().items() if issubclass(kernel, NativeKernel)}
    assert sorted(library.kernel_number(name) for name in names) == list(range(len(names)))
    with pytest.raises(MptifyError, match="it has no kernel 'nothing'"):
        library.kernel_number("nothing")


def test_a_field_that_the_library_does_not_have_is_refused():
    with pytest.raises(MptifyError, match="its Step has no 'bananas'"):
        library.fill(library.Step(), {"bananas": 3})
