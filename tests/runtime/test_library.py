"""The library describes itself, and Python refuses one that does not fit."""

import ctypes
import subprocess

import pytest

from mptify.errors import MptifyError
from mptify.nn.build import library_of
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
int mptify_packed_compiles() { return 0; }
void* mptify_packed_compile() { return nullptr; }
void mptify_packed_release() {}
void mptify_packed_run() {}
}
"""


def layout():
    """What the library says of its structures."""
    code = ctypes.CDLL(str(library_of(module._SOURCE)))
    code.mptify_packed_layout.restype = ctypes.c_char_p
    return code.mptify_packed_layout().decode()


def with_layout(folder, text):
    lines = "".join(f'"{line}\\n"' for line in text.splitlines())
    (folder / "stub.cpp").write_text(f"#define LAYOUT {lines}\n{STUB}")
    command = ["g++", "-shared", "-fPIC", str(folder / "stub.cpp"), "-o", str(folder / "stub.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "stub.so"))


def test_the_structures_are_those_that_the_library_describes(tmp_path):
    again = Library(with_layout(tmp_path, layout()))
    assert ctypes.sizeof(again.Step) == ctypes.sizeof(library.Step)
    assert again.Step.output.offset == library.Step.output.offset
    assert again.signature != library.signature  # it has no kernels


@pytest.mark.parametrize(
    ("old", "new", "struct"),
    [
        ("number channels 0\n", "", "ConvShape"),
        ("buffer table ", "buffer table 1", "Step"),
        ("struct ConvShape 1", "struct ConvShape 2", "ConvShape"),
    ],
)
def test_a_library_with_structures_that_python_would_fill_wrongly_is_refused(
    tmp_path, old, new, struct
):
    assert old in layout()
    with pytest.raises(MptifyError, match=rf"The {struct} of .* lies in memory in another way"):
        Library(with_layout(tmp_path, layout().replace(old, new)))


def test_without_a_library_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SOURCE", tmp_path / "none.cpp")
    assert module._load() is None


def test_every_native_kernel_is_in_the_library():
    names = {name for name, kernel in kernels.all().items() if issubclass(kernel, NativeKernel)}
    of_quantizers = {"quantize", "dequantize"}
    numbers = {library.kernel_number(name) for name in names - of_quantizers | {"lanes_arrange"}}
    assert numbers == set(range(len(library.kernel_names)))
    with pytest.raises(MptifyError, match="has no kernel 'nothing'"):
        library.kernel_number("nothing")


def test_a_field_that_the_library_does_not_have_is_refused():
    with pytest.raises(MptifyError, match="has no 'bananas' in its Step"):
        library.fill(library.Step(), {"bananas": 3})
