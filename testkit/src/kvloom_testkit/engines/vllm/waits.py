"""Measures how long the worker waits in its connector's calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

CALLS = ("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_transfer_results")
"""Calls of each step, between which the model computes. vLLM calls `get_finished` by the last one."""


def waits() -> dict[str, float]:
    """The longest seconds in each of the calls from now on, by name; empty without a connector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    found: dict[str, float] = {}
    if has_kv_transfer_group():
        connector = get_kv_transfer_group()
        for name in CALLS:
            setattr(connector, name, _timed(name, getattr(connector, name), found))
    return found


def _timed(name: str, call: Callable[..., Any], found: dict[str, float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            found[name] = max(found.get(name, 0.0), time.perf_counter() - begin)

    return timed
