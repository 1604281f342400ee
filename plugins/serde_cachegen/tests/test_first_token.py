"""The first token of a sequence comes back as it was, however lossy the rest is; in single layers, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from profiles import profile_of

from kvloom import Chunk, CorruptBlobError, KVSpec, MemoryFormat
from kvloom_serde_cachegen.serializer import CacheGenSerializer

SPEC = KVSpec("m", 3, 2, 32, "bfloat16")
TOKENS = 20


@pytest.fixture(params=["step", "klt"])
def serializer(request: pytest.FixtureRequest, tmp_path: Path) -> CacheGenSerializer:
    profile_of(2, 3, 64).save(tmp_path / "profile")
    settings: dict[str, Any] = {"mode": request.param, "profile": tmp_path / "profile", "codec_gate": False}
    return CacheGenSerializer(CacheGenSerializer.Config.model_validate(settings), SPEC)


def chunk_of(start: int | None, tokens: int = TOKENS, seed: int = 1) -> Chunk:
    kv = torch.randn(SPEC.blob_shape(tokens), generator=torch.Generator().manual_seed(seed)) * 3
    kv[:, :, 0] *= 30
    return Chunk(kv.to(torch.bfloat16), MemoryFormat.KV_BLOB, tokens, start=start)


def back(serializer: CacheGenSerializer, blob: Any, tokens: int = TOKENS) -> torch.Tensor:
    into = Chunk(torch.zeros(SPEC.blob_shape(tokens), dtype=torch.bfloat16), MemoryFormat.KV_BLOB, tokens)
    serializer.decode(blob, into)
    return into.tensor


def test_it_is_kept_where_a_sequence_begins_and_nowhere_else(serializer: CacheGenSerializer) -> None:
    for start, kept in ((0, True), (1, False), (256, False), (None, False)):
        chunk = chunk_of(start)
        blob = serializer.encode(chunk)
        assert len(blob) == 3 + kept
        assert sum(memoryview(each).nbytes for each in blob) <= serializer.max_encoded_bytes(chunk)
        got = back(serializer, blob)
        assert torch.equal(got[:, :, 0], chunk.tensor[:, :, 0]) == kept
        assert not torch.equal(got[:, :, 1:], chunk.tensor[:, :, 1:])


def test_what_is_behind_it_is_encoded_as_if_it_were_not_there(serializer: CacheGenSerializer) -> None:
    whole = chunk_of(0)
    rest = Chunk(whole.tensor[:, :, 1:].contiguous(), whole.format, TOKENS - 1, start=1)
    streams = [bytes(each) for each in serializer.encode(whole)[:-1]]
    assert streams == [bytes(each) for each in serializer.encode(rest)]


def test_single_layers_have_it_too(serializer: CacheGenSerializer) -> None:
    chunk = chunk_of(0)
    blob = serializer.encode(chunk)
    numbers = serializer.layer_buffers([len(each) for each in blob], chunk, {})
    assert numbers == [(0, 3), (1, 3), (2, 3)]
    whole = back(serializer, blob)
    for layers in (range(1), range(1, 3), range(2, 3)):
        into = torch.zeros_like(whole)[:, layers.start : layers.stop]
        some = [blob[number] for number in (*layers, 3)]
        serializer.decode_layers(some, layers, Chunk(into, chunk.format, TOKENS))
        assert torch.equal(into, whole[:, layers.start : layers.stop])


def test_several_chunks_of_one_prompt(serializer: CacheGenSerializer) -> None:
    chunks = [chunk_of(start, seed=start) for start in (0, TOKENS, 2 * TOKENS)]
    into = [Chunk(torch.zeros_like(chunk.tensor), chunk.format, TOKENS) for chunk in chunks]
    blobs = serializer.encode_many(chunks)
    serializer.decode_many(blobs, into)
    for chunk, blob, got in zip(chunks, blobs, into, strict=True):
        assert [bytes(each) for each in blob] == [bytes(each) for each in serializer.encode(chunk)]
        assert torch.equal(got.tensor, back(serializer, blob))


def test_a_sequence_of_one_token(serializer: CacheGenSerializer) -> None:
    blob = serializer.encode(chunk_of(0, 1))
    assert len(blob) == 3
    back(serializer, blob, 1)


@pytest.mark.parametrize("mode", ["lossless", "cachegen"])
def test_other_modes_do_without(mode: str) -> None:
    one = CacheGenSerializer(CacheGenSerializer.Config.model_validate({"mode": mode}), SPEC)
    assert len(one.encode(chunk_of(0))) == 3


def test_what_is_no_first_token_is_refused(serializer: CacheGenSerializer) -> None:
    *streams, first = map(bytes, serializer.encode(chunk_of(0)))
    for wrong in (b"", first[:-1], first[: len(first) // 3], first + b"\0", first + first[: len(first) // 3]):
        with pytest.raises(CorruptBlobError):
            back(serializer, [*streams, wrong])
    with pytest.raises(CorruptBlobError):
        back(serializer, [*streams, first], 1)
    with pytest.raises(CorruptBlobError):
        back(serializer, [*streams[:2], first])


# -- attention sinks ---------------------------------------------------------------------------------------------------


def with_sinks(start: int | None) -> Chunk:
    chunk = chunk_of(start, 40)
    chunk.tensor[:, :, 0] /= 30
    chunk.tensor[1] += 5
    for layer, token in SINKS:
        chunk.tensor[1, layer, token] *= 0.1
    return chunk


SINKS = [(0, 7), (0, 31), (2, 7)]


@pytest.mark.parametrize("start", [0, 256])
def test_attention_sinks_come_back_as_they_were(serializer: CacheGenSerializer, start: int) -> None:
    chunk = with_sinks(start)
    blob = serializer.encode(chunk)
    assert sum(memoryview(each).nbytes for each in blob) <= serializer.max_encoded_bytes(chunk)
    got = back(serializer, blob, 40)
    exact = (got == chunk.tensor).all(-1).all(0)
    assert exact.nonzero().tolist() == sorted([*map(list, SINKS), *([layer, 0] for layer in range(3) if start == 0)])
    numbers = serializer.layer_buffers([memoryview(each).nbytes for each in blob], chunk, {})
    assert numbers is not None
    for layers in (range(1), range(1, 2), range(1, 3), range(2, 3)):  # the second layer has none
        into = torch.zeros_like(got)[:, layers.start : layers.stop]
        some = [blob[number] for number in (*layers, *numbers[0][1:])]
        serializer.decode_layers(some, layers, Chunk(into, chunk.format, 40))
        assert torch.equal(into, got[:, layers.start : layers.stop])


@pytest.mark.parametrize("serializer", ["klt"], indirect=True)
def test_what_are_no_sinks_is_refused(serializer: CacheGenSerializer) -> None:
    *streams, sinks = map(bytes, serializer.encode(with_sinks(256)))
    each = len(sinks) // 3
    assert len(streams) == 4 and not streams[3]
    far = sinks[:2] + b"\x28\0" + sinks[4:]
    another_layer = sinks[: 2 * each] + b"\3\0" + sinks[2 * each + 2 :]
    twice, backwards = sinks[:each] + sinks, sinks[2 * each :] + sinks[:each]
    for wrong in (b"", sinks[:-1], sinks + b"\0", far, another_layer, twice, backwards):
        with pytest.raises(CorruptBlobError, match="sinks"):
            back(serializer, [*streams, wrong], 40)
    got = back(serializer, [*streams, sinks[each:]], 40)
    assert torch.equal(got[:, 0, 31], with_sinks(256).tensor[:, 0, 31])
