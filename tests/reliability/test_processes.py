"""Processes and threads that meet on one directory: each read is a miss or exactly one version of the chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from meeting import CAPACITY_BYTES, PROMPTS, SALTS, SPEC, open_on, versions, visit
from reliability_children import processes
from reliability_support import GENEROUS_SECONDS, audit, eventually, ledger_bytes


def meet(path: Path, number: int, seconds: float, tally: Callable[..., None]) -> None:
    children = []
    for who in range(1, number + 1):
        mine, theirs = processes.Pipe(duplex=False)
        child = processes.Process(target=visit, args=(str(path), who, seconds, theirs), daemon=True)
        child.start()
        children.append((child, mine))
    sums: Counter[str] = Counter()
    for child, mine in children:
        assert mine.poll(seconds + GENEROUS_SECONDS), "it hangs"
        report = mine.recv()
        assert isinstance(report, dict), report
        sums.update(report)
        child.join(GENEROUS_SECONDS)
        assert child.exitcode == 0
    assert min(sums[name] for name in ("missed", "of another process", "purges", "evicted")) > 0, sums
    assert sums["corrupt"] == 0, "nobody saw a blob that was not whole"

    found = audit(path)
    assert not found.broken and not found.unfinished
    with open_on(str(path)) as engine:
        eventually(lambda: engine.health().tiers[1].recovered, "the listing of the store")
        eventually(lambda: ledger_bytes(engine) == audit(path).bytes <= CAPACITY_BYTES, "exact accounting")
        for prompt, tokens in enumerate(PROMPTS):
            for salt in set(SALTS):
                got = torch.zeros(SPEC.blob_shape(len(tokens)), dtype=torch.uint8)
                versions(prompt, got, engine.retrieve(tokens, kv=got, salt=salt))
    tally(processes=number, **{name.replace(" ", "_"): number for name, number in sums.items()})


def test_processes_that_meet(store_path: Path, tally: Callable[..., None]) -> None:
    meet(store_path, 3, 0.5, tally)


@pytest.mark.slow
def test_processes_that_meet_for_longer(store_path: Path, tally: Callable[..., None]) -> None:
    meet(store_path, 4, 30, tally)
