"""scripts/test_gpu.sh on a machine without a GPU: it says what is missing before it compiles for minutes."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def run(
    python: str | Path, *parts: str, path: str = os.environ["PATH"], folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    command = [str(shutil.which("sh")), str(ROOT / "scripts/test_gpu.sh"), str(python), *parts]
    return subprocess.run(command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True)


def without_packages(folder: Path, options: str) -> Path:
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {options} "$@"\n')
    python.chmod(0o755)
    return python


def test_it_names_the_packages_that_are_missing(tmp_path: Path) -> None:
    poor = without_packages(tmp_path, "-I")
    done = run(poor, "build", "codec")
    assert done.returncode == 1 and "has no torch, numpy: install" in done.stderr, done.stderr
    done = run(poor, "build", "test")
    assert done.returncode == 1 and "has no torch, numpy, pluggy, pydantic, yaml" in done.stderr, done.stderr
    assert f"make gpu-packages GPU_VERSION={VERSION}" in done.stderr and not done.stdout


def test_it_takes_packages_that_were_fetched_elsewhere(tmp_path: Path) -> None:
    poor, fetched = without_packages(tmp_path, ""), tmp_path / f"build/gpu-packages-{VERSION}"
    for name in ("torch", "numpy", *ABSENT, "pytest"):
        (fetched / name).mkdir(parents=True)
        (fetched / name / "__init__.py").write_text("")
    (fetched / "torch/__init__.py").write_text("__version__ = '0'\nclass cuda: is_available = staticmethod(bool)\n")
    done = run(poor, "test", folder=tmp_path)
    assert done.returncode == 1 and "torch 0 finds no CUDA device" in done.stderr, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_builds_nothing(tmp_path: Path) -> None:
    for name in ("nvcc", "g++"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    done = run(sys.executable, "build", "codec", path=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1 and "finds no CUDA device: nothing was built" in done.stderr, done.stderr
    for name in ("nvcc", "g++"):
        (tmp_path / name).unlink()
    done = run(sys.executable, "build", path=str(tmp_path))
    assert done.returncode == 1 and "nvcc and g++ not found" in done.stderr, done.stderr


def test_it_names_the_parts_that_there_are() -> None:
    done = run(sys.executable, "nonsense")
    assert done.returncode == 2
    assert done.stdout == "no part nonsense: build, test, memcheck, racecheck, codec, paged\n"


BENCHES = """
import importlib, sys

sys.modules.update(dict.fromkeys(sys.argv[2:]))  # importing one of these fails
sys.path.insert(0, "bench")
for name in ("codec_gpu", "paged_gpu"):
    try:
        importlib.import_module(name).main()
    except SystemExit as error:
        print(f"{name}: {error}")
if sys.argv[1] == "rehearse":
    sys.argv[1] = "--rehearse"
    importlib.reload(sys.modules["paged_ways"])
    importlib.reload(sys.modules["paged_gpu"]).main()
"""
ABSENT = ("rich", "pydantic", "pydantic_core", "pluggy", "yaml", "xxhash", "safetensors", "typer", "hypothesis")


def test_its_benches_need_torch_and_no_other_package() -> None:
    """With CUDA absent they say so, and name what there is instead. With a compiler, all of the paged one is run."""
    compiles = shutil.which("c++") is not None
    command = [sys.executable, "-c", BENCHES, "rehearse" if compiles else "", *ABSENT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("codec_gpu", "paged_gpu"):
        assert f"{name}: no kernels to measure: " in done.stdout
    if compiles:
        assert "there is no pydantic, pluggy, yaml, xxhash: an engine's load from memory" in done.stdout
        assert "| write: type: vllm | 8 |" in done.stdout


def test_its_tests_are_there() -> None:
    named = [word.strip('"') for word in (ROOT / "scripts/test_gpu.sh").read_text().split() if "/tests/" in word]
    folders = {"$codec": "plugins/serde_cachegen", "$pages": "plugins/connector_vllm", "$blend": "plugins/blend"}
    paths = [word.removeprefix('tests="') for word in named]
    for short, folder in folders.items():
        paths = [path.replace(short, folder) for path in paths]
    assert len(paths) >= 8 and [path for path in paths if not (ROOT / path).is_file()] == []


def kernels() -> Any:
    """scripts/kernels.py, as a module."""
    spec = importlib.util.spec_from_file_location("kernels", ROOT / "scripts/kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_kernels_has_all_of_them_and_only_one_spills() -> None:
    folders = [ROOT / f"plugins/{name}/csrc" for name in ("serde_cachegen", "connector_vllm", "blend")]
    texts = [path.read_text() for folder in folders for path in folder.iterdir() if path.suffix in (".cu", ".h")]
    kernel = re.compile(r"^KV\w_KERNEL (?:KVZ_BOUNDS\(.*?\) )?(\w+)\(", re.MULTILINE)
    names = {name for text in texts for name in kernel.findall(text)}
    rows = [line.split(" | ") for line in kernels().TABLE.read_text().splitlines() if line.startswith("| `")]
    assert names == set(kernels().LAUNCHES) == {row[0].strip("| `").split("<")[0] for row in rows}
    for name, _, spilled, *_ in rows:
        assert int(spilled) < (400 if "encode_tiles" in name else 1), name


def test_what_ptxas_says_is_read() -> None:
    said = """Compiling entry function 'void kvz::cuda::decode_tiles<kvz::BF16, (kvz::Mode)1>(int)' for 'sm_90'
    0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers, 24 bytes smem
"""
    assert kernels().kernels_of(said) == [("decode_tiles<BF16, 1>", 48, 12, 24)]
    assert kernels().occupancy(48, 512, 90368) == (32, "registers, shared memory")
    assert kernels().occupancy(32, 256, 0) == (64, "registers, warps")


def test_without_nvcc_no_table_is_made() -> None:
    before = kernels().TABLE.read_bytes()
    command = [sys.executable, "scripts/kernels.py"]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "kernels: left out, because there is no nvcc\n", done.stderr
    assert kernels().TABLE.read_bytes() == before
