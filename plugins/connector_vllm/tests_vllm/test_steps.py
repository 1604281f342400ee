"""The connector's answers to single calls of vLLM's, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")


def test_blocks_that_vllm_sets_to_zero_count_as_written() -> None:
    """A request that was preempted in the step that gave them to it is in no list of the step's."""
    from kvloom_connector_vllm.adapter.connector import KVLoomConnector

    told: list[Any] = []
    connector: Any = object.__new__(KVLoomConnector)
    connector._scheduler = SimpleNamespace(orders=lambda *parts, **more: told.append(parts))
    running = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    output = SimpleNamespace(
        total_num_scheduled_tokens=0, num_scheduled_tokens={}, scheduled_spec_decode_tokens={}, scheduled_new_reqs=[],
        scheduled_cached_reqs=running, kv_connector_block_state=None, new_block_ids_to_zero=[5, 6],
    )  # fmt: skip
    connector.build_connector_meta(output)
    assert told[0][2] == [5, 6]


@pytest.mark.parametrize(("v2", "zeroed", "first"), [(True, True, True), (True, False, False), (False, True, False)])
def test_the_v2_runner_writes_to_blocks_with_states_before_it_tells_the_connector(
    v2: bool, zeroed: bool, first: bool
) -> None:
    from kvloom_connector_vllm.adapter import platform

    config, kv_cache_config = SimpleNamespace(use_v2_model_runner=v2), SimpleNamespace(needs_kv_cache_zeroing=zeroed)
    assert platform.written_first(config, kv_cache_config) is first
    assert platform.written_first(SimpleNamespace(), SimpleNamespace()), "unknown: the worse of both"
