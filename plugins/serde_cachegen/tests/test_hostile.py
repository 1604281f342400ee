"""The codec under the address and undefined behaviour sanitizers: damaged streams, a kept corpus, and a fuzzer.

Seconds for the fuzzer: KVLOOM_FUZZ_SECONDS, 60 unless it says otherwise, for all targets together.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[1]
CORPUS = PLUGIN / "fuzz/corpus"
TARGETS = ("decode", "encode")
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

pytestmark = pytest.mark.slow


def run(*command: str | Path, timeout: float = 1800) -> str:
    """The output of a command. Fails with the end of it if the command fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=ENVIRONMENT,
        timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def build() -> Callable[..., Path]:
    """Builds programs of fuzz/ and says where they are; what was built before is built again only where it changed."""

    def built(name: str, *settings: str, programs: tuple[str, ...]) -> Path:
        place = PLUGIN / "build" / name
        run("cmake", "-S", PLUGIN / "fuzz", "-B", place, "-G", "Ninja", *settings)
        run("cmake", "--build", place, "--target", *programs)
        return place

    return built


@pytest.fixture(scope="module")
def programs(build: Callable[..., Path]) -> Path:
    return build("fuzz", programs=("damage", *(f"replay_{target}" for target in TARGETS)))


@pytest.fixture(scope="module")
def fuzzers(build: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of clang; where it is missing, or comes without its fuzzer, the tests are skipped."""
    clang = shutil.which("clang++")
    if clang is None:
        pytest.skip("nothing is fuzzed: there is no clang++ (scripts/fuzzer.sh)")
    source = tmp_path_factory.mktemp("probe") / "probe.cpp"
    source.write_text('extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }\n')
    command = [clang, "-fsanitize=fuzzer,address", source, "-o", source.with_suffix("")]
    probe = subprocess.run(command, capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"nothing is fuzzed: {clang} has no fuzzer (scripts/fuzzer.sh): {probe.stderr.strip()[:200]}")
    settings = (f"-DCMAKE_CXX_COMPILER={clang}",)
    return build("fuzz-clang", *settings, programs=tuple(f"fuzz_{target}" for target in TARGETS))


def test_no_damage_that_can_be_listed_does_harm(programs: Path, record_property: Callable[[str, object], None]) -> None:
    """Cuts, flipped bits, other geometries, overlapping tiles, hostile tables, random streams."""
    record_property("said", f"serde_cachegen: {run(programs / 'damage').strip()}")


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_fuzzer_found_worth_keeping(programs: Path, target: str) -> None:
    assert len(list((CORPUS / target).iterdir())) > 50
    run(programs / f"replay_{target}", CORPUS / target)


@pytest.mark.parametrize("target", TARGETS)
def test_a_fuzzer_finds_nothing(
    fuzzers: Path, target: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    seconds = max(1, int(os.environ.get("KVLOOM_FUZZ_SECONDS", "60")) // len(TARGETS))
    # What is resident counts the sanitizers' shadow on some kernels: what is allocated is limited instead.
    said = run(
        fuzzers / f"fuzz_{target}", f"-max_total_time={seconds}", "-max_len=4096", "-rss_limit_mb=0",
        "-malloc_limit_mb=2048", "-timeout=120", "-print_final_stats=1",
        f"-artifact_prefix={fuzzers}/found-{target}-", tmp_path, CORPUS / target, timeout=seconds + 600,
    )  # fmt: skip
    last = [line for line in said.splitlines() if "cov:" in line][-1]
    record_property("said", f"serde_cachegen, fuzz_{target}, {seconds} s: {last.strip()}")
