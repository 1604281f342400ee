"""Many threads, little memory, a store that fails now and then: every byte that comes back is checked."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from core_support import Shelf, kv_of, matches, tokens_of

from kvloom import BackendError, Engine

Open = Callable[..., Engine]
PROMPTS = 12


def hammer(open_engine: Open, seconds: float) -> None:
    engine = open_engine(
        {"type": "memory", "capacity": "96KiB"}, {"type": "shelf", "deadline": "200ms", "capacity": "320KiB"}
    )
    shelf = Shelf.shelves["default"]
    chance = random.Random(7)

    def trouble(verb: str, key: str) -> None:
        roll = chance.random()
        if roll < 0.01:
            raise OSError(5, "Input/output error")
        if roll < 0.012:
            time.sleep(0.3)
        if roll < 0.02 and key in shelf._blobs:
            blob = bytearray(shelf._blobs[key])
            blob[chance.randrange(len(blob))] ^= 1
            shelf._blobs[key] = bytes(blob)

    shelf.before = trouble
    prompts = [
        (tokens_of(4 * length, seed), kv_of(4 * length, seed)) for seed, length in enumerate(range(3, 3 + PROMPTS))
    ]
    wrong: list[str] = []
    retrieved = 0
    until = time.monotonic() + seconds

    def work(seed: int) -> None:
        nonlocal retrieved
        mine = random.Random(seed)
        try:
            while time.monotonic() < until and not wrong:
                tokens, kv = prompts[mine.randrange(PROMPTS)]
                verb = mine.random()
                if verb < 0.45:
                    engine.store(tokens, kv=kv)
                elif verb < 0.9:
                    got = torch.zeros_like(kv)
                    mask = engine.retrieve(tokens, kv=got)
                    retrieved += int(mask.sum())
                    if not matches(got, kv, mask):
                        wrong.append("wrong bytes")
                elif verb < 0.93:
                    engine.prefetch(tokens)
                elif verb < 0.96:
                    engine.pin(tokens[:4])
                    engine.unpin(tokens[:4])
                else:
                    with contextlib.suppress(BackendError):  # it says so, and may be asked again
                        engine.remove(tokens) if verb < 0.99 else engine.clear()
        except BaseException as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
        assert not thread.is_alive(), "somebody hangs"
    assert not wrong
    assert retrieved, "something was hit"
    shelf.before = lambda *_: None
    assert engine.flush(20)
    memory = engine._stack.memory
    deadline = time.monotonic() + 20
    while memory.used_bytes and time.monotonic() < deadline:
        engine.clear()  # more than once: what is being prefetched still arrives
        time.sleep(0.01)
    assert memory.used_bytes == 0, "every page came back"


def test_nothing_wrong_hangs_or_leaks(open_engine: Open) -> None:
    hammer(open_engine, 1.5)


@pytest.mark.slow
def test_nothing_wrong_hangs_or_leaks_for_longer(open_engine: Open) -> None:
    hammer(open_engine, 45)
