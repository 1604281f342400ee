"""Every field of LMCache 0.5's configuration in one process, its default, and what it is here or why it is nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["mapped", "not needed", "no counterpart", "unknown"]


@dataclass(frozen=True, slots=True)
class Row:
    """One field of the source, and what became of it. Its value may be a secret, and is not in here."""

    field: str
    outcome: Outcome
    text: str
    """The setting that it is now, or the reason that there is none."""


@dataclass(frozen=True, slots=True)
class Known:
    """A field that is not mapped."""

    default: Any
    outcome: Outcome
    why: str


def _needless(default: Any, why: str) -> Known:
    return Known(default, "not needed", why)


def _absent(default: Any, why: str) -> Known:
    return Known(default, "no counterpart", why)


ALIASES = {
    "enable_xpyd": "enable_pd",
    "nixl_peer_host": "pd_peer_host",
    "nixl_peer_init_port": "pd_peer_init_port",
    "nixl_peer_alloc_port": "pd_peer_alloc_port",
    "nixl_proxy_host": "pd_proxy_host",
    "nixl_proxy_port": "pd_proxy_port",
    "nixl_role": "pd_role",
    "controller_url": "controller_pull_url",
    "lmcache_worker_port": "lmcache_worker_ports",
    "plugin_locations": "runtime_plugin_locations",
    "external_backends": "storage_plugins",
    "distributed_url": "p2p_host",
}
"""Older names, each with the one of 0.5."""

_PEERS = "peers find each other's KV in a pool: a tier {type: mooncake, master: HOST:PORT} (docs/use/mooncake.md)"
_DISAGGREGATED = (
    "prefill and decode on different machines is vLLM's own connectors' work (NixlConnector, MooncakeConnector)"
)
_CONTROLLER = (
    "there is no controller: routers are told by KV events (docs/use/events.md), operators use `kvloom`'s verbs"
)
_HASHES = "keys are SHA-256 in every process, whatever its environment"
_POOL = "memory grows in slabs up to `capacity`, and is touched in the background"
_PROBES = "`kvloom trace` records what is asked for, and replays it against any configuration"
_SERVER = "`observers: [prometheus]` has a `port` and a `host`"
_HIDDEN = "only KV is kept, no hidden states"
_BYPASS = "a scheduler asks the shared tiers itself, and a mirror of the workers' memory"
_PLUGINS = "a plugin of kvloom's is a package with an entry point (docs/extend/your-first-backend.md)"

NOT_MAPPED: Mapping[str, Known] = {
    "local_cpu_use_hugepages": _absent(False, "pages are the system's choice (transparent huge pages)"),
    "reserve_local_cpu_size": _absent(0.0, "set `capacity` so that enough is left"),
    "local_disk_path_sharding": _needless("by_gpu", "ranks share one directory; their keys differ"),
    "pre_caching_hash_algorithm": _needless("builtin", _HASHES),
    "use_layerwise": _needless(False, "an engine that can take layers asks for layers (docs/use/layers.md)"),
    "blend_thresholds": _absent(None, "tokens are chosen by share, not by threshold"),
    "retrieve_locations": _absent(None, "every tier is asked, fast to slow; `lookup(search_range)` asks some"),
    "p2p_host": _absent(None, _PEERS),
    "p2p_init_ports": _absent(None, _PEERS),
    "p2p_lookup_ports": _absent(None, _PEERS),
    "mp_host": _absent(None, "there is no server process between engine and tiers"),
    "mp_port": _needless(5555, "there is no server process between engine and tiers"),
    "enable_controller": _absent(False, _CONTROLLER),
    "controller_pull_url": _absent(None, _CONTROLLER),
    "controller_reply_url": _absent(None, _CONTROLLER),
    "lmcache_worker_ports": _absent(None, _CONTROLLER),
    "lmcache_worker_ids": _absent(None, _CONTROLLER),
    "lmcache_worker_heartbeat_delay_time": _needless(10, _CONTROLLER),
    "lmcache_worker_heartbeat_time": _absent(None, _CONTROLLER),
    "enable_pd": _absent(False, _DISAGGREGATED),
    "pd_role": _absent(None, _DISAGGREGATED),
    "pd_buffer_size": _absent(None, _DISAGGREGATED),
    "pd_buffer_device": _absent(None, _DISAGGREGATED),
    "pd_peer_host": _absent(None, _DISAGGREGATED),
    "pd_peer_init_port": _absent(None, _DISAGGREGATED),
    "pd_peer_alloc_port": _absent(None, _DISAGGREGATED),
    "pd_peer_query_port": _absent(None, _DISAGGREGATED),
    "pd_proxy_host": _absent(None, _DISAGGREGATED),
    "pd_proxy_port": _absent(None, _DISAGGREGATED),
    "pd_allocation_timeout_sec": _needless(float("inf"), _DISAGGREGATED),
    "pd_shutdown_timeout_sec": _needless(5.0, _DISAGGREGATED),
    "pd_condition_poll_interval_sec": _needless(0.005, _DISAGGREGATED),
    "pd_max_prefill_len": _absent(0, _DISAGGREGATED),
    "pd_backend_mode": _needless("async", _DISAGGREGATED),
    "pd_skip_proxy_notification": _absent(False, _DISAGGREGATED),
    "pd_bidirectional": _absent(False, _DISAGGREGATED),
    "transfer_channel": _absent(None, _DISAGGREGATED),
    "nixl_peer_port": _absent(None, _DISAGGREGATED),
    "nixl_backends": _absent(None, _DISAGGREGATED),
    "nixl_buffer_size": _absent(None, _DISAGGREGATED),
    "nixl_buffer_device": _absent(None, _DISAGGREGATED),
    "gds_path": _absent(None, "no tier reads past the host's memory; {type: disk, path: ...} uses O_DIRECT"),
    "gds_path_sharding": _needless("by_gpu", "goes with gds_path"),
    "gds_buffer_size": _absent(None, "goes with gds_path"),
    "use_gds": _needless(True, "goes with gds_path"),
    "gds_backend": _needless("cufile", "goes with gds_path"),
    "maru_path": _absent(None, "there is no plugin for Maru"),
    "maru_pool_size": _needless(4.0, "goes with maru_path"),
    "audit_actual_remote_url": _absent(None, "`observers: [log]` writes down what is stored and read"),
    "internal_api_server_host": _needless("127.0.0.1", _SERVER),
    "internal_api_server_port_start": _needless(6999, _SERVER),
    "internal_api_server_include_index_list": _absent(None, _SERVER),
    "internal_api_server_socket_path_prefix": _absent(None, _SERVER),
    "lookup_timeout_ms": _needless(3000, "a lookup waits for a tier's `deadline` at most"),
    "external_lookup_client": _absent(None, _BYPASS),
    "py_enable_gc": _needless(True, "nothing switches the interpreter's collector"),
    "numa_mode": _absent(None, "memory is where the process runs: start it with numactl"),
    "enable_async_loading": _needless(False, "vLLM's requests always load while others compute (`async_load`)"),
    "priority_limit": _absent(None, "every request may store; quotas of tenants bound what is kept"),
    "runtime_plugin_locations": _absent(None, _PLUGINS),
    "storage_plugins": _absent(None, _PLUGINS),
    "remote_storage_plugins": _absent(None, _PLUGINS),
    "min_retrieve_tokens": _absent(0, "a hit is one chunk or more: raise `chunk_tokens`"),
    "hit_miss_ratio": _absent(None, _BYPASS),
    "lookup_server_worker_ids": _absent(None, _BYPASS),
    "enable_scheduler_bypass_lookup": _needless(False, _BYPASS),
    "script_allowed_imports": _absent(None, "no code is taken over a socket"),
    "run_script_api_enabled": _absent(False, "no code is taken over a socket"),
    "enable_lazy_memory_allocator": _needless(False, _POOL),
    "lazy_memory_initial_ratio": _needless(0.2, _POOL),
    "lazy_memory_expand_trigger_ratio": _needless(0.5, _POOL),
    "lazy_memory_step_ratio": _needless(0.1, _POOL),
    "lazy_memory_safe_size": _needless(0.0, _POOL),
    "enable_chunk_statistics": _needless(False, _PROBES),
    "chunk_statistics_auto_start_statistics": _needless(False, _PROBES),
    "chunk_statistics_auto_exit_timeout_hours": _needless(0.0, _PROBES),
    "chunk_statistics_auto_exit_target_unique_chunks": _needless(0, _PROBES),
    "chunk_statistics_strategy": _needless("memory_bloom_filter", _PROBES),
    "use_gpu_connector_v3": _needless(False, "the connector chooses its kernels"),
    "pin_timeout_sec": _needless(300, "a lease lasts as long as the load that it belongs to"),
    "pin_check_interval_sec": _needless(30, "a lease lasts as long as the load that it belongs to"),
    "remote_config_url": _absent(None, "the configuration is a file, with KVLOOM_ variables over it"),
    "app_id": _absent(None, "goes with remote_config_url"),
    "enable_hidden_state_cache": _absent(False, _HIDDEN),
    "max_hidden_state_cpu_size": _needless(2.0, _HIDDEN),
    "hidden_state_layers": _absent(None, _HIDDEN),
    "hidden_states_retrieve_mode": _needless("prefix_strict", _HIDDEN),
    "error_handling": _needless(False, "always on: a tier's failure is a miss"),
}
"""Fields that have no place in a configuration of kvloom, with LMCache's defaults."""

MAPPED: Mapping[str, Any] = {
    "chunk_size": 256,
    "local_cpu": True,
    "max_local_cpu_size": 5.0,
    "local_disk": None,
    "max_local_disk_size": 0.0,
    "remote_url": None,
    "remote_serde": "naive",
    "save_decode_cache": False,
    "save_unfull_chunk": False,
    "enable_blending": False,
    "blend_recompute_ratio": None,
    "blend_recompute_ratios": None,
    "blend_check_layers": None,
    "blend_min_tokens": 256,
    "blend_special_str": " # # ",
    "store_location": None,
    "enable_p2p": False,
    "lookup_url": None,
    "lmcache_instance_id": None,
    "blocking_timeout_secs": 10,
    "cache_policy": "LRU",
    "enable_kv_events": False,
    "internal_api_server_enabled": False,
    "extra_config": None,
}
"""Fields that have one, with LMCache's defaults."""
