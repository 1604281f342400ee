"""The loader for compiled parts, with a library made on the spot."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvloom import PluginError, native
from kvloom.device import stream_of_launch

SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
SOURCE = "#include <stdint.h>\nint64_t total(const uint8_t *at, int64_t n) "
SOURCE += "{ int64_t sum = 0; while (n--) sum += *at++; return sum; }\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package without a library."""
    folder = tmp_path / "kvloom_made_here"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


@pytest.fixture
def library(package: Path) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) on this machine")
    (package / "total.c").write_text(SOURCE)
    output = package / f"libtotal{SUFFIX}"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", output, package / "total.c"], check=True)
    library = native.load("kvloom_made_here", "total")
    library.total.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.total.restype = ctypes.c_int64
    return library


def test_a_library_is_found_in_its_package_and_reads_what_pointer_points_to(library: ctypes.CDLL) -> None:
    tensor = torch.arange(10, dtype=torch.uint8)
    assert library.total(native.pointer(tensor), 10) == 45
    assert library.total(native.pointer(tensor[4:]), 6) == 39
    read_only = memoryview(bytes(range(10)))
    assert library.total(native.pointer(read_only), 10) == 45
    assert library.total(native.pointer(read_only[4:]), 6) == 39
    assert library.total(native.pointer(bytearray(b"\1\2")), 2) == 3
    assert library.total(native.pointer(b""), 0) == 0


def test_a_missing_library_says_where_and_what_to_do(package: Path) -> None:
    with pytest.raises(PluginError) as caught:
        native.load("kvloom_made_here", "total")
    assert f"no libtotal{SUFFIX} in {package}" in str(caught.value)
    assert "pip install kvloom-made-here --force-reinstall --no-deps" in str(caught.value)


def test_a_file_that_is_no_library_says_so(package: Path) -> None:
    (package / f"libtotal{SUFFIX}").write_bytes(b"not machine code")
    with pytest.raises(PluginError, match=r"cannot be loaded .* reinstall kvloom-made-here on this machine"):
        native.load("kvloom_made_here", "total")


def test_a_missing_package_says_so() -> None:
    with pytest.raises(PluginError, match="kvloom_nowhere: not an installed package; pip install kvloom-nowhere"):
        native.load("kvloom_nowhere", "total")


def test_work_on_a_cpu_has_no_stream() -> None:
    with stream_of_launch(torch.device("cpu")) as handle:
        assert handle == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_stream_is_the_current_one() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), stream_of_launch(torch.device("cuda")) as handle:
        assert handle == stream.cuda_stream


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "1 device"), (8, "8 devices"), (0, "no device"), (-100, "no device (error 100)"),
        (-35, "NVIDIA's driver is missing or too old (error 35)"), (-2, "CUDA does not start (error 2)"),
    ],
)  # fmt: skip
def test_a_reason_is_given_why_there_are_no_devices(count: int, said: str) -> None:
    assert native.about_devices(count) == f"built with CUDA, {said}"
