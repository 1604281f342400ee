"""Fixtures of the tools' tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cli_support import CHUNK, blobs_in, fill, write_lines
from clock_support import Hang, skipping_clock
from hypothesis import settings

from kvloom.runtime import SystemRuntime

settings.register_profile("kvloom", deadline=None, max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", 25)))
settings.load_profile("kvloom")

torch.set_num_threads(1)


@pytest.fixture
def hang() -> Iterator[Hang]:
    """A gate that store calls hang at, on a clock that skips ahead while everybody waits."""
    with skipping_clock() as clock:
        hang = Hang(clock)
        yield hang
        hang.open()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the wall clock."""
    ahead, wall = 0.0, time.time

    def move(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    for owner, name in ((time, "time"), (SystemRuntime, "wall")):
        monkeypatch.setattr(owner, name, staticmethod(lambda: wall() + ahead))
    return move


# -- two disk tiers, of which the slow one has more --------------------------------------------------------------------


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    return tmp_path / "fast"


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return tmp_path / "slow"


@pytest.fixture
def write_config(tmp_path: Path, fast: Path, slow: Path) -> Callable[..., Path]:
    def write_config(of_fast: str = "", of_slow: str = "", name: str = "engine") -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(
            f"chunk_tokens: {CHUNK}\n"
            "tiers:\n"
            "- {type: memory, capacity: 1MiB}\n"
            f"- {{type: disk, name: fast, path: {fast}, {of_fast}}}\n"
            f"- {{type: disk, name: slow, path: {slow}, {of_slow}}}\n"
        )
        return path

    return write_config


@pytest.fixture
def config(write_config: Callable[..., Path]) -> Path:
    return write_config()


@pytest.fixture
def tokens(config: Path, fast: Path) -> list[int]:
    """Six chunks, of which the fast tier has lost all but the second."""
    tokens = fill(config, 6)
    for index, file in enumerate(blobs_in(fast)):
        if index != 1:
            file.unlink()
    return tokens


@pytest.fixture
def prompts(tmp_path: Path, tokens: list[int]) -> Path:
    """The stored prompt with something behind it, one that was never stored, and the first of another tenant."""
    return write_lines(
        tmp_path / "prompts.jsonl",
        {"tokens": [*tokens, 999, 998]},
        {"tokens": [7] * 9},
        {"tokens": tokens, "salt": "tenant"},
    )
