"""Settings that cannot work are refused by name, from vLLM's own configuration, before anything runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import settings

from kvloom import ConfigError
from kvloom_blend.vllm.settings import Settings


def config_of(tiny: Path, extra: dict[str, Any], *, transfer: dict[str, Any] | None = None, **more: Any) -> Any:
    """A VllmConfig, as `vllm serve` makes it."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    kv = KVTransferConfig(**{
        "kv_connector": "KVLoomBlendConnector", "kv_connector_module_path": "kvloom_blend.vllm",
        "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
        **(transfer or {}),
    })  # fmt: skip
    arguments = {"enable_prefix_caching": False, "kv_cache_memory_bytes": 64 << 20, **more}
    return EngineArgs(model=str(tiny), kv_transfer_config=kv, max_model_len=2048, **arguments).create_engine_config()


@pytest.mark.parametrize(("change", "said"), [
    ({"enable_prefix_caching": True}, "start with --no-enable-prefix-caching"),
    ({"enable_prefix_caching": None}, "start with --no-enable-prefix-caching"),
    ({"transfer": {"kv_load_failure_policy": "fail"}}, '"kv_load_failure_policy": "recompute"'),
    ({"transfer": {"kv_role": "kv_producer"}}, "write kv_consumer"),
    ({"load_format": "dummy"}, "load_format 'dummy'"),
    ({"hf_overrides": {"rope_theta": 5.0}}, "hf_overrides"),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}}, "speculative"),
])  # fmt: skip
def test_by_the_connector(tiny: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvloom_blend.vllm import KVLoomBlendConnector

    config = config_of(tiny, {"config": settings(tmp_path, "none")}, **change)
    for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
        with pytest.raises(ValueError, match="KVLoomBlendConnector: ") as error:
            KVLoomBlendConnector(config, role, None)
        assert said in str(error.value)


@pytest.mark.parametrize(("name", "value", "said"), [
    ("tensor_parallel_size", 2, "tensor_parallel_size 2: each rank has a part of the heads"),
    ("pipeline_parallel_size", 2, "pipeline_parallel_size 2: each rank has a part of the layers"),
    ("decode_context_parallel_size", 2, "decode_context_parallel_size 2"),
])  # fmt: skip
def test_several_ranks(tiny: Path, tmp_path: Path, name: str, value: int, said: str) -> None:
    from kvloom_blend.vllm.settings import refuse

    config = config_of(tiny, {"config": settings(tmp_path, "none")})
    refuse(config)
    setattr(config.parallel_config, name, value)
    with pytest.raises(ValueError, match=said):
        refuse(config)


def test_quantised_weights(tiny: Path, tmp_path: Path) -> None:
    from kvloom_blend.vllm.settings import refuse

    config = config_of(tiny, {"config": settings(tmp_path, "none")})
    config.model_config.quantization = "fp8"
    with pytest.raises(ValueError, match="quantization 'fp8'"):
        refuse(config)


def test_among_other_connectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """MultiConnector hands its parts a configuration that does not say so; what vLLM's worker talks to does."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    from kvloom_blend.vllm import KVLoomBlendConnector

    ours = KVLoomBlendConnector.__new__(KVLoomBlendConnector)
    ours._worker = SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", object())
    with pytest.raises(ValueError, match="Make it the only one"):
        ours.register_kv_caches({})


@pytest.mark.parametrize(("extra", "said"), [
    ({}, "kv_connector_extra_config.config"),
    ({"config": "/nowhere/blend.yaml"}, "/nowhere/blend.yaml"),
    ({"config": {"connector": "transformers"}}, "blend: is not there"),
    ({"least": 1}, "kv_connector_extra_config.least: unknown key; there are config, least_found"),
    ({"least": 1, "least_found": 0}, "kv_connector_extra_config.config: missing"),
    ({"config": {"chunk_tokens": 0}, "least_found": 0}, "\nchunk_tokens: "),
    ({"config": {}, "least_found": 0}, "kv_connector_extra_config.least_found: expected a share above 0"),
    ({"config": {}, "least_found": True}, "kv_connector_extra_config.least_found: expected a share above 0"),
])  # fmt: skip
def test_settings(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Settings.read(extra)
    assert said in str(error.value)


PLAIN = {
    "prompt_token_ids": list(range(64)), "prompt_embeds": None, "num_output_tokens": 0, "lora_request": None,
    "mm_features": [], "resumable": False, "skip_reading_prefix_cache": False, "kv_transfer_params": None,
    "sampling_params": SimpleNamespace(prompt_logprobs=None),
}  # fmt: skip


@pytest.mark.parametrize("change", [
    {"prompt_token_ids": list(range(63))}, {"prompt_token_ids": None}, {"prompt_embeds": object()},
    {"num_output_tokens": 1}, {"lora_request": object()}, {"mm_features": [object()]}, {"resumable": True},
    {"skip_reading_prefix_cache": True}, {"sampling_params": None},
    {"sampling_params": SimpleNamespace(prompt_logprobs=0)}, {"kv_transfer_params": {"kvloom_blend": False}},
])  # fmt: skip
def test_requests_that_are_not_blended(change: dict[str, Any]) -> None:
    from kvloom_blend.vllm.connector import _can_be_blended

    assert _can_be_blended(SimpleNamespace(**PLAIN), 64)
    assert not _can_be_blended(SimpleNamespace(**{**PLAIN, **change}), 64)
