"""SIGKILL at any moment: what the next process finds is whole, counted to the byte, and nothing else lies about."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from reliability_children import PROMPTS, open_on, processes, prompt, store_for_ever
from reliability_support import audit, eventually, forget_memory, ledger_bytes, retrieved


def wait_for_a_write(path: Path) -> None:
    """Until a file is being written; not for long, because the child may have done with everything."""
    until = time.monotonic() + 1
    while not os.listdir(path / "+tmp") and time.monotonic() < until:
        pass


def kill(path: Path, times: int, tally: Callable[..., None]) -> None:
    rng = random.Random(3)
    prompts = [prompt(seed) for seed in range(PROMPTS)]
    hits = cut_off = blobs = 0
    for turn in range(times):
        ready, theirs = processes.Pipe(duplex=False)
        child = processes.Process(target=store_for_ever, args=(str(path), turn, theirs), daemon=True)
        child.start()
        ready.recv()
        time.sleep(rng.expovariate(20))
        if turn % 2:
            wait_for_a_write(path)
        child.kill()
        child.join()
        left = audit(path)
        cut_off += len(left.unfinished)
        assert not left.broken, "what is published is whole, whoever dies when"
        with open_on(str(path)) as engine:
            eventually(lambda: engine.health().tiers[1].recovered, "the listing of the store")
            # The files that were cut off are gone; one of this process's own may be there for a moment.
            eventually(lambda: not audit(path).unfinished, "the last unfinished file gone")
            found = audit(path)
            assert ledger_bytes(engine) == found.bytes and not found.broken
            hits += sum(retrieved(engine, tokens, kv) > 0 for tokens, kv in prompts)
            tokens, kv = prompts[turn % PROMPTS]
            engine.store(tokens, kv=kv)
            assert engine.flush()
            found = audit(path)
            assert ledger_bytes(engine) == found.bytes and not found.broken and not found.unfinished
            assert retrieved(engine, tokens, kv) == len(tokens), "and it goes on"
            forget_memory(engine)
            blobs += found.blobs
    assert hits, "nothing survived: nothing was tested"
    assert cut_off or times < 50, "no kill hit a write: nothing was tested"
    tally(kills=times, files_cut_off=cut_off, blobs_verified=blobs, prompts_hit=hits)


def test_killed_while_storing(store_path: Path, tally: Callable[..., None]) -> None:
    kill(store_path, 3, tally)


@pytest.mark.slow
def test_killed_again_and_again_while_storing(store_path: Path, tally: Callable[..., None]) -> None:
    kill(store_path, 60, tally)
