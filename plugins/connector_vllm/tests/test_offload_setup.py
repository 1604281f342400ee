"""The identity of offloaded KV: different KV gets different keys, and settings that keys do not cover are refused by
name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_fakes import vllm_config

from kvloom import KVSpec, MemoryFormat, fingerprint
from kvloom_connector_vllm.offload.pages import OffloadPagesConnector
from kvloom_connector_vllm.offload.settings import OffloadPagesConfig, PieceGeometry
from kvloom_connector_vllm.offload.setup import described, described_from_outside, refuse, told_by_worker


def group(number: int, *layers: str, tokens: int = 16) -> SimpleNamespace:
    return SimpleNamespace(group_id=number, layer_names=layers, tokens_per_block=tokens)


def offloading(folder: Path, **changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "groups": (group(0, "a", "b"), group(1, "c", "d")),
        "model": SimpleNamespace(name=str(folder), dtype="float32"),
        "cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        "replicated_layout": False, "canonical_layout": False, "kv_cache_layout": "LBHNC",
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def name(spec: KVSpec, geometry: PieceGeometry) -> str:
    connector = OffloadPagesConnector(OffloadPagesConfig(geometry=geometry), spec)
    return fingerprint(spec, MemoryFormat.KV_PAGES, connector.representation)


def told(config: Any, known: Any, pages: Any = ((8, 8), (6, 6)), **about: Any) -> dict[str, Any]:
    return told_by_worker(config, known, pages=pages, about={"vllm": "0.32", **about})


CHANGES: dict[str, dict[str, Any]] = {
    "groups": {"groups": (group(0, "a", "b", "c"), group(1, "d"))},
    "order of groups": {"groups": (group(0, "c", "d"), group(1, "a", "b"))},
    "tokens of a block": {"groups": (group(0, "a", "b", tokens=32), group(1, "c", "d"))},
    "layout": {"kv_cache_layout": "BLHNC"},
    "chunks": {"cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2)},
    "hashes": {"cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1)},
    "ranks": {"parallel": SimpleNamespace(tp_size=2, pp_size=1, pcp_size=1, dcp_size=1)},
}


@pytest.mark.parametrize("change", ["weights", "hash", "dtype", "cache dtype", "mamba", "version", "pages", *CHANGES])
def test_what_may_not_be_shared_has_another_name(model: Path, change: str) -> None:
    config, known, about, pages = vllm_config(str(model)), offloading(model), {}, ((8, 8), (6, 6))
    config.cache_config.mamba_cache_dtype = "auto"
    before = name(*described([told(config, known)], slot_bytes=[16]))
    assert name(*described([told(config, known)], slot_bytes=[16])) == before
    if change == "weights":
        (model / "model.safetensors").write_bytes(b"\1" * (3 << 20))
    elif change == "hash":
        config.cache_config.prefix_caching_hash_algo = "sha256_cbor"
    elif change == "dtype":
        config.model_config.dtype = torch.bfloat16
    elif change == "cache dtype":
        config.cache_config.cache_dtype = "fp8"
    elif change == "mamba":
        config.cache_config.mamba_cache_dtype = "float32"
    elif change == "version":
        about = {"vllm": "0.33"}
    elif change == "pages":
        pages = ((6, 10), (6, 6))
    else:
        known = offloading(model, **CHANGES[change])
    assert name(*described([told(config, known, pages, **about)], slot_bytes=[16])) != before


def test_ranks_go_together_or_not_at_all(model: Path) -> None:
    config, known = vllm_config(str(model)), offloading(model)
    first, second = told(config, known), told(config, known, ((4, 4), (3, 3)))
    spec, geometry = described([first, second], slot_bytes=[16, 8])
    assert geometry.piece_bytes == [16, 8]
    assert name(spec, geometry) != name(*described([second, first], slot_bytes=[16, 8]))
    with pytest.raises(ValueError, match="rank 1"):
        described([first, {**second, "revision": "other weights"}], slot_bytes=[16, 8])


@pytest.mark.parametrize("change", ["weights", "revision", "row", "dtype", *CHANGES])
def test_without_vllms_configuration_what_is_known_counts(model: Path, change: str) -> None:
    def named(known: Any, *, row: int = 64, revision: str = "1") -> str:
        return name(*described_from_outside(known, row_bytes=row, revision=revision, about={"vllm": "0.32"}))

    before = named(offloading(model))
    assert named(offloading(model)) == before
    if change == "weights":
        (model / "model.safetensors").write_bytes(b"\1" * (3 << 20))
        assert named(offloading(model)) != before
    elif change == "dtype":
        assert named(offloading(model, model=SimpleNamespace(name=str(model), dtype="fp8"))) != before
    elif change == "revision":
        assert named(offloading(model), revision="2") != before
    elif change == "row":
        assert named(offloading(model), row=128) != before
    else:
        assert named(offloading(model, **CHANGES[change])) != before


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ({"prefix_caching_hash_algo": "xxhash"}, "may collide"),
        ({"cache_dtype": "int8_per_token_head"}, "int8_per_token_head: not tested"),
        ({"cache_dtype": "bfloat16"}, "kv_cache_dtype bfloat16 on a processor"),
        ({"lora": True}, "LoRA"),
        ({"speculation": "eagle"}, "eagle"),
        ({"chunks": 2}, "blocks_per_chunk"),
    ],
)
def test_what_is_not_covered_is_refused(model: Path, what: dict[str, Any], text: str) -> None:
    config, known = vllm_config(str(model)), offloading(model)
    config.lora_config = config.speculative_config = None
    refuse(config, known)
    if "lora" in what:
        config.lora_config = SimpleNamespace()
    elif "speculation" in what:
        config.speculative_config = SimpleNamespace(method="ngram")
        refuse(config, known)
        config.speculative_config = SimpleNamespace(method=what["speculation"])
    elif "chunks" in what:
        known = offloading(model, cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2))
        refuse(config, offloading(model, cache=known.cache, groups=known.groups[:1]))
    else:
        vars(config.cache_config).update(what)
    with pytest.raises(ValueError, match=text):
        refuse(config, known)


def test_pieces_are_checked_by_name() -> None:
    spec = KVSpec(model="m", num_layers=1, num_kv_heads=1, head_size=1, dtype="uint8")
    connector = OffloadPagesConnector(OffloadPagesConfig(geometry=PieceGeometry(piece_bytes=[4, 2])), spec)
    rows = [torch.zeros(3, 4, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.uint8)]
    connector.check({"rows": rows, "slots": [2, 0]}, 2)
    assert connector.shape(2) == (2, 6)
    for where, text in (
        ({"slots": [0]}, "rows= and slots="),
        ({"rows": rows[:1], "slots": [0]}, "rows: expected"),
        ({"rows": rows[::-1], "slots": [0]}, "rows: expected"),
        ({"rows": [row.float() for row in rows], "slots": [0]}, "rows: expected"),
        ({"rows": rows, "slots": [3]}, "no slot 3"),
        ({"rows": rows, "slots": [-1]}, "no slot -1"),
        ({"rows": rows, "slots": [0]}, "1 for 2"),
    ):
        with pytest.raises(ValueError, match=text):
            connector.check(where, 2)
    with pytest.raises(ValueError, match="opened by vLLM"):
        OffloadPagesConnector(OffloadPagesConfig(), replace(spec))
