"""`kvloom_tools.warm`: the memory of a server that has just started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_support import CHUNK, SPEC, blobs_in, fill, key_of, write_lines

import kvloom_tools
from kvloom import ConfigError, Engine, KVSpec, envelope


@pytest.fixture
def open_engine(config: Path) -> Iterator[Callable[..., Engine]]:
    engines = []

    def open_engine(spec: KVSpec = SPEC, path: Path = config) -> Engine:
        engines.append(Engine.open(path, spec))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def test_a_server_warms_its_memory(open_engine: Callable[..., Engine], prompts: Path, tokens: list[int]) -> None:
    engine = open_engine()
    first, second, third = kvloom_tools.warm(engine, prompts)
    assert first == kvloom_tools.Warmed(line=1, tokens=26, warm_tokens=24, pinned_tokens=0)
    assert (second.warm_tokens, third.warm_tokens) == (0, 0)
    assert engine.lookup(torch.tensor(tokens), search_range=["memory"]).tokens == 24


def test_pins_outlive_what_comes_later(
    write_config: Callable[..., Path], open_engine: Callable[..., Engine], prompts: Path, tokens: list[int]
) -> None:
    config = write_config()
    config.write_text(config.read_text().replace("1MiB", "64KiB"))  # eight chunks, each in a buffer of 8 KiB
    engine = open_engine(path=config)
    assert kvloom_tools.warm(engine, prompts, pin=True)[0].pinned_tokens == 24
    for first in range(1000, 1400, 20):
        other = torch.arange(first, first + 5 * CHUNK)
        engine.store(other, kv=torch.zeros(SPEC.blob_shape(20), dtype=SPEC.torch_dtype))
    assert engine.lookup(torch.tensor(tokens), search_range=["memory"]).tokens == 24
    engine.unpin(torch.tensor(tokens))
    for first in range(1000, 1400, 20):
        other = torch.arange(first, first + 5 * CHUNK)
        engine.store(other, kv=torch.zeros(SPEC.blob_shape(20), dtype=SPEC.torch_dtype))
        engine.prefetch(other).result()
    assert engine.lookup(torch.tensor(tokens), search_range=["memory"]).tokens < 24


def test_keys_in_a_server(open_engine: Callable[..., Engine], tmp_path: Path, tokens: list[int], slow: Path) -> None:
    engine = open_engine()
    keys = [key_of(file, slow) for file in blobs_in(slow)]
    foreign = f"{'0a' * 16}/-/0-{'3f' * 32}"
    file = write_lines(tmp_path / "keys", keys[0], keys[1], foreign, keys[2][:-2] + "00")
    found = kvloom_tools.warm(engine, file, pin=True)
    assert [(one.tokens, one.warm_tokens, one.pinned_tokens) for one in found] == [(4, 4, 4)] * 2 + [(0, 0, 0)] * 2
    assert engine.lookup(torch.tensor(tokens), search_range=["memory"]).tokens == 8


def test_a_key_of_another_model_is_left_alone(
    open_engine: Callable[..., Engine], tmp_path: Path, config: Path, slow: Path
) -> None:
    """Its chunk has another shape: read as one of ours, it would be taken for damage and removed."""
    fill(config, 1, replace(SPEC, num_layers=4))
    (blob,) = blobs_in(slow)
    file = write_lines(tmp_path / "keys", key_of(blob, slow))
    assert kvloom_tools.warm(open_engine(), file)[0].warm_tokens == 0
    envelope.unseal(blob.read_bytes(), key=key_of(blob, slow))


def test_text_and_a_tokenizer_of_ones_own(
    open_engine: Callable[..., Engine], tmp_path: Path, tokens: list[int]
) -> None:
    file = write_lines(tmp_path / "p", {"text": "x" * 24})
    (one,) = kvloom_tools.warm(open_engine(), file, tokenizer=lambda text: range(len(text)))
    assert one.warm_tokens == 24


def test_without_memory_there_is_nothing_to_warm(tmp_path: Path, fast: Path) -> None:
    source = {"chunk_tokens": CHUNK, "tiers": [{"type": "disk", "path": str(fast)}]}
    with Engine.open(source, SPEC) as engine, pytest.raises(ConfigError, match="no memory tier"):
        kvloom_tools.warm(engine, write_lines(tmp_path / "p", {"tokens": [1]}))
