"""A child process in the tests of fork and spawn; run as a script, the parent of many children.

python fork_support.py {fork|forkserver|spawn} FOLDER TIMES
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from typing import Any

import torch

from kvloom import BackendError, Engine, KVSpec

SPEC = KVSpec(model="forked", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16")
after_fork_in_child: Engine | None = None
"""The parent's engine, in a forked child."""


def config(folder: str) -> dict[str, Any]:
    tiers = [{"type": "memory", "capacity": "256KiB"}, {"type": "disk", "path": folder, "capacity": "64MiB"}]
    return {"chunk_tokens": 4, "connector": "plain", "tiers": tiers}


def prompt(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their KV."""
    chance = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 1000, (16,), generator=chance)
    return tokens, torch.randn(2, 2, 16, 8, generator=chance).to(torch.bfloat16)


def check(engine: Engine, seed: int, *, all_of_it: bool) -> None:
    tokens, kv = prompt(seed)
    got = torch.zeros_like(kv)
    mask = engine.retrieve(tokens, kv=got)
    assert torch.equal(got[:, :, mask], kv[:, :, mask]), "wrong bytes"
    assert not got[:, :, ~mask].any(), "bytes where there should be none"
    assert not all_of_it or mask.all(), f"{int(mask.sum())} of 16 tokens"


def child(folder: str, number: int) -> None:
    """Refuse the parent's engine, then use one of its own over the same store."""
    if after_fork_in_child is not None:
        said = ""
        try:
            after_fork_in_child.lookup(prompt(0)[0])
        except BackendError as error:
            said = str(error)
        assert f"opened in process {os.getppid()};" in said, said or "the parent's engine answered"
        after_fork_in_child.close()
    with Engine.get_or_create("default", config(folder), SPEC) as engine:
        check(engine, 0, all_of_it=True)
        tokens, kv = prompt(1000 + number)
        engine.store(tokens, kv=kv)
        assert engine.flush(20)
        check(engine, 1000 + number, all_of_it=True)


def parent(method: str, folder: str, times: int) -> None:
    """Start children while threads store and retrieve; all must do well, and so must what goes on here."""
    global after_fork_in_child
    context: Any = multiprocessing.get_context(method)
    after_fork_in_child = engine = Engine.get_or_create("default", config(folder), SPEC)
    tokens, kv = prompt(0)
    engine.store(tokens, kv=kv)
    engine.pin(tokens)
    assert engine.flush(20)
    stop, wrong = threading.Event(), []

    def work(start: int) -> None:
        seed = start
        try:
            while not stop.is_set():
                seed = start + (seed + 1) % 40
                tokens, kv = prompt(seed)
                engine.store(tokens, kv=kv)
                check(engine, seed, all_of_it=False)
                engine.prefetch(tokens).result(20)
        except BaseException as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(start,), daemon=True) for start in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for number in range(times):
        process = context.Process(target=child, args=(folder, number))
        process.start()
        process.join(60)
        if process.exitcode != 0:
            process.kill()
            wrong.append(f"child {number} hangs" if process.exitcode is None else f"child {number} failed")
            break
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "the parent hangs"
    assert not wrong, wrong
    for number in range(times):
        check(engine, 1000 + number, all_of_it=True)
    assert engine.flush(20)
    engine.close()
    print(f"{times} children by {method}")


if __name__ == "__main__":
    parent(sys.argv[1], sys.argv[2], int(sys.argv[3]))
