"""A forward pass that waits for each layer's KV as it comes to it, and stores each as it leaves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvloom import Engine
from kvloom_connector_transformers import RestoredKV, spec_of


class Lost(Exception):
    """Fewer tokens are there than the pass was begun with."""


def run(model: PreTrainedModel, tokens: torch.Tensor, cache: DynamicCache, *, before: Any, after: Any) -> torch.Tensor:
    """The logits of the tokens that `cache` lacks; `before` and `after` are called with each layer's number."""
    hooks = []
    for number, layer in enumerate(model.model.layers):
        hooks.append(layer.register_forward_pre_hook(lambda *_, number=number: before(number)))
        hooks.append(layer.register_forward_hook(lambda *_, number=number: after(number)))
    try:
        with torch.no_grad():
            return model(input_ids=tokens[None, cache.get_seq_length() :], past_key_values=cache).logits
    finally:
        for hook in hooks:
            hook.remove()


def prefill(model: PreTrainedModel, engine: Engine, tokens: torch.Tensor) -> torch.Tensor:
    """Compute every token and store what is missing, layer by layer."""
    cache = DynamicCache(config=model.config)
    with engine.store_layer(tokens, cache=cache) as storing:
        logits = run(model, tokens, cache, before=lambda _: None, after=storing.layer)
        storing.finish()
    return logits


def resume(model: PreTrainedModel, engine: Engine, tokens: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The logits behind the KV that the engine has, and with how many tokens of it each pass was begun."""
    forecast = engine.lookup(tokens).tokens
    restored = RestoredKV.allocate(engine.spec, forecast)
    passes = [forecast]
    with engine.retrieve_layer(tokens[:forecast], cache=restored) as loading:

        def before(layer: int) -> None:
            there = int(loading.wait(layer).sum())
            if there < passes[-1]:
                passes.append(there)
                raise Lost

        while True:
            try:
                cache = restored.install(model.config, passes[-1])
                return run(model, tokens, cache, before=before, after=lambda _: None), passes
            except Lost:
                continue


@pytest.fixture
def disk(tmp_path: Path, config: dict[str, Any]) -> dict[str, Any]:
    return config | {"tiers": [{"type": "disk", "path": str(tmp_path)}]}


def test_logits_are_those_of_a_pass_that_restored_everything_first(
    llama: PreTrainedModel, prompt: torch.Tensor, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloom.pipeline.layer_read.WHOLE_BYTES", 0)
    monkeypatch.setattr("kvloom.builtin.raw._SMALL_BYTES", 0)
    tokens = prompt[0]
    with Engine.open(disk, spec_of(llama)) as engine:
        full = prefill(llama, engine, tokens)
        assert engine.flush(20) and engine.lookup(tokens).tokens == 64
        restored = RestoredKV.allocate(engine.spec, 64)
        assert engine.retrieve(tokens[:64], cache=restored).all()
        whole = run(llama, tokens, restored.install(llama.config, 64), before=lambda _: None, after=lambda _: None)
        logits, passes = resume(llama, engine, tokens)
        assert passes == [64] and torch.equal(logits, whole)
        torch.testing.assert_close(logits[0, -1], full[0, -1], atol=1e-4, rtol=1e-4)


def test_a_chunk_that_is_lost_part_way_costs_a_pass_and_nothing_else(
    llama: PreTrainedModel, prompt: torch.Tensor, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvloom.pipeline.layer_read.WHOLE_BYTES", 0)
    monkeypatch.setattr("kvloom.tiers.stored.layer_ranges.RANGE_BYTES", 1)
    monkeypatch.setattr("kvloom.builtin.raw._SMALL_BYTES", 0)
    tokens = prompt[0]
    with Engine.open(disk, spec_of(llama)) as engine:
        full = prefill(llama, engine, tokens)
        assert engine.flush(20)
        digest = engine.segments(tokens)[2].key.digest.hex()
        (path,) = [path for path in tmp_path.rglob("*") if path.is_file() and digest in path.name]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1  # V of the last layer
        path.write_bytes(data)
        logits, passes = resume(llama, engine, tokens)
        assert passes == [64, 32], "the loss was found before the last layer used it"
        torch.testing.assert_close(logits[0, -1], full[0, -1], atol=1e-4, rtol=1e-4)
