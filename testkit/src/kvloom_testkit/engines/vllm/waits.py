"""Measures how long an engine waits in its connector's calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_WORKER = ("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_transfer_results")
"""Calls of each step, between which the model computes. vLLM calls `get_finished` by the last one."""
_SCHEDULER = (
    "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "update_connector_output",
    "request_finished",
)  # fmt: skip
"""Calls between steps, while no model computes."""


def waits(scheduler: Any) -> dict[str, float]:
    """The longest seconds in each of the calls from now on, by name; empty without a connector.

    scheduler: its connector, or None. The worker's connector is this process's, if it is not in another one.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    worker = get_kv_transfer_group() if has_kv_transfer_group() else None
    found: dict[str, float] = {}
    for connector, names in ((worker, _WORKER), (scheduler, _SCHEDULER)):
        if connector is not None:
            for name in names:
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
