"""The namespace of KV's keys, which tests of identity compare."""

from __future__ import annotations

from typing import Any

from vllm_fakes import kv_cache_config

from kvloom import MemoryFormat
from kvloom_connector_vllm.identity import identify
from kvloom_connector_vllm.names import Names
from kvloom_connector_vllm.scheduling.plan import Owner


def namespace(config: Any, known: Any = None, *, rank: int = 0, owner: Owner | None = None, **about: Any) -> str:
    one = identify(config, known or kv_cache_config(), rank=rank, about=about)
    return Names(one.spec, one.geometry, MemoryFormat.KV_PAGES, chunk_tokens=8).namespace(owner or Owner())
