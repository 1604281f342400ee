"""The files of the core that one `retrieve` passes: counted, and bounded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from core_support import CHUNK, SPEC, kv_of, tokens_of

import kvloom
from kvloom import Engine

CORE = str(Path(kvloom.__file__).parent)
TOKENS, KV = tokens_of(4 * CHUNK), kv_of(4 * CHUNK)


def for_the_call() -> bool:
    name = threading.current_thread().name
    return name == "caller" or "-read-" in name or "-ask-" in name


class Passed:
    """The files of the core whose code ran for the call: on its thread, and on those that read for it.

    Other threads, such as the one that makes pages of the pool, run when they come to it.
    """

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.counting = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if self.counting and event == "call" and frame.f_code.co_filename.startswith(CORE) and for_the_call():
            self.files[frame.f_code.co_filename[len(CORE) + 1 :]] = None


def files_passed(below: list[str], *, cold: bool) -> list[str]:
    """By one `retrieve` of four chunks, in the order in which they are come to first."""
    passed = Passed()

    def run() -> None:
        with Engine.open({"chunk_tokens": CHUNK, "connector": "plain", "tiers": ["memory", *below]}, SPEC) as engine:
            engine.store(TOKENS, kv=KV)
            assert engine.flush()
            memory = engine._stack.memory
            got = torch.zeros_like(KV)
            for _ in range(2):  # at first it learns the shapes of blobs
                if cold:
                    memory.remove(memory.chunks())
                passed.files.clear()
                passed.counting = True
                assert engine.retrieve(TOKENS, kv=got).all()
                passed.counting = False
            assert torch.equal(got, KV)

    threading.setprofile(passed)
    try:
        # Not the main thread, whose verbs run on threads that began earlier.
        thread = threading.Thread(target=run, name="caller")
        thread.start()
        thread.join(60)
    finally:
        threading.setprofile(sys.getprofile())
    return list(passed.files)


@pytest.mark.parametrize(("below", "cold", "most"), [([], False, 15), (["dict"], True, 40)], ids=["hit", "cold"])
def test_few_files_are_passed(
    below: list[str], cold: bool, most: int, record_property: Callable[[str, object], None]
) -> None:
    files = files_passed(below, cold=cold)
    record_property("said", f"{'a cold read' if cold else 'a memory hit'} passes {len(files)} files")
    assert 8 <= len(files) <= most, "\n".join(files)
