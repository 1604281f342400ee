"""The mixed load of `make soak`, in a process of its own, whose memory is nobody else's."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from reliability_support import GENEROUS_SECONDS, kv_of, open_engine, tokens_of
from soak import Sample, growth

SCRIPT = Path(__file__).parent / "soak.py"


def run(path: Path, seconds: float, tally: Callable[..., None]) -> str:
    command = [sys.executable, str(SCRIPT), "--minutes", str(seconds / 60), "--path", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 300)
    assert done.returncode == 0, done.stdout + done.stderr
    tally(calls=sum(int(count.replace(",", "")) for count in re.findall(r"([\d,]+) [a-z]+(?=,|$)", done.stdout)))
    return done.stdout


def test_mixed_load_for_a_moment(tmp_path: Path, tally: Callable[..., None]) -> None:
    run(tmp_path, 0.8, tally)


@pytest.mark.slow
def test_mixed_load_for_two_minutes(tmp_path: Path, tally: Callable[..., None]) -> None:
    print(run(tmp_path, 120, tally))


def test_a_flush_is_over_although_others_go_on_storing(tmp_path: Path) -> None:
    with open_engine({"type": "memory", "capacity": "4MiB"}, {"type": "disk", "path": str(tmp_path)}) as engine:
        done = threading.Event()

        def store() -> None:
            for seed in itertools.count():
                engine.store(tokens_of(16, seed), kv=kv_of(16, seed))
                if done.is_set():
                    return

        threads = [threading.Thread(target=store) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            assert all(engine.flush(GENEROUS_SECONDS) for _ in range(20))
        finally:
            done.set()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize(
    ("last", "complaint"),
    [
        ((100 << 20, 20, 9), ""),
        ((117 << 20, 20, 9), "memory grew by 17.0 MiB"),
        ((100 << 20, 25, 9), "threads grew beyond 20"),
        ((100 << 20, 20, 14), "files grew beyond 9"),
        ((100 << 20, 20, 9, 193 << 20), "193.0 MiB are mapped"),
    ],
)
def test_growth_is_noticed(last: tuple[int, ...], complaint: str) -> None:
    warm_up = [Sample(float(at), at << 20, 0, at, at) for at in range(10)]
    flat = [Sample(10.0 + at, 100 << 20, 0, 20, 9) for at in range(20)]
    own, threads, files, mapped = (*last, 0)[:4]
    end = [Sample(30.0 + at, own, mapped, threads, files) for at in range(10)]
    assert growth([*warm_up, *flat, *end]) == ([complaint] if complaint else [])
