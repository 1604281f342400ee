"""With and without the CUDA toolkit: what is built, what is said, and what fails."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
CSRC = Path(__file__).parents[1] / "csrc"
TOOLS = ("cmake", "ninja")


@pytest.fixture
def without_nvcc(tmp_path: Path) -> dict[str, str]:
    """An environment in which there is a C++ compiler, and no other."""
    bin = tmp_path / "bin"
    bin.mkdir()
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for name in ("c++", "g++", "gcc", "cc", "as", "ld", "ar", "ranlib", "uname", "sh", *TOOLS):
        if (found := shutil.which(name, path=places)) is not None:
            (bin / name).symlink_to(found)
    return {"PATH": str(bin), "HOME": str(tmp_path)}


def configured(build: Path, environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["cmake", "-S", CSRC, "-B", build, "-G", "Ninja", *options], env=environment, capture_output=True, text=True
    )


def test_a_release_with_cuda_fails_without_nvcc(tmp_path: Path, without_nvcc: dict[str, str]) -> None:
    done = configured(tmp_path / "build", without_nvcc, "-DKVZ_CUDA=ON")
    assert done.returncode != 0 and "there is no nvcc: install the CUDA toolkit" in " ".join(done.stderr.split())


def test_without_nvcc_the_build_for_processors_is_made_and_says_so(
    tmp_path: Path, without_nvcc: dict[str, str]
) -> None:
    done = configured(tmp_path / "build", without_nvcc)
    assert done.returncode == 0, done.stderr
    assert "is built without CUDA, because there is no nvcc" in " ".join(done.stderr.split())
    assert "kvz_cuda" not in (tmp_path / "build" / "build.ninja").read_text()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here: the kernels are not compiled by it")
def test_the_kernels_compile_and_load_without_a_driver(tmp_path: Path) -> None:
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": places}
    done = configured(tmp_path, environment, "-DKVZ_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90-real")
    assert done.returncode == 0, done.stderr
    subprocess.run(["ninja", "-C", tmp_path, "kvz_cuda"], env=environment, check=True, capture_output=True)
    kernels = ctypes.CDLL(str(tmp_path / "libkvz_cuda.so"))
    assert kernels.kvz_cuda_devices() != 0  # so many, or that there is no driver
