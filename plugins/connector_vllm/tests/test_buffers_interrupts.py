"""Ctrl-C in any verb of a buffer leaves its locks free, and the room that it had reserved."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from buffers_support import ids, lookup, store

from kvloom_connector_vllm.buffers import KVLookupBuffer, KVStoreBuffer

KV = torch.zeros(4)


class Interrupt:
    """A trace function that raises KeyboardInterrupt at one call or return on this thread."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Interrupt:
        if event in ("call", "return"):
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt
        return self


def insert_and_drop(buffer: KVLookupBuffer) -> None:
    buffer.insert(ids(1, 2), None, KV, KV, KV)  # type: ignore[arg-type]
    buffer.drop_select(None, None)


def put_and_get(buffer: KVStoreBuffer) -> None:
    buffer.put("a", KV)
    buffer.get("a")
    buffer.put("a", None)
    buffer.counts()


@pytest.mark.parametrize(("make", "verbs"), [(lookup, insert_and_drop), (store, put_and_get)])
def test_nothing_is_left_locked(make: Callable[..., Any], verbs: Callable[[Any], None]) -> None:
    at = 0
    while True:
        at += 1
        buffer, interrupt = make(timeout=10), Interrupt(at)
        try:
            sys.settrace(interrupt)
            verbs(buffer)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if interrupt.seen < at:
            break
        again = threading.Thread(target=verbs, args=(buffer,), daemon=True)
        again.start()
        again.join(20)
        assert not again.is_alive(), f"after an interrupt at event {at}"
    assert at > 20
