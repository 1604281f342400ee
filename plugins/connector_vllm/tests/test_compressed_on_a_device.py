"""Compressed chunks of a stored tier, without a memory tier: decoded on the device, which does queued work as late and
as out of order as it may. The compressed bytes alone go over the bus."""

from __future__ import annotations

import gc
import random
import sys
import zlib
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from math import inf
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from test_engine_on_a_device import BLOCK_TOKENS, CHUNK_BLOCKS, ELEMENTS, GEOMETRY, LAYERS, Model

from kvloom import (
    Buffers,
    Chunk,
    Config,
    CorruptBlobError,
    Engine,
    MemoryFormat,
    Place,
    Serializer,
    UnreadableBlobError,
    hookimpl,
)
from kvloom.device import device_of
from kvloom.plugins.registry import Registry
from kvloom.runtime import SystemRuntime
from kvloom.tiers.stored import decoding
from kvloom_connector_vllm.paged.blocks import VLLMConnector
from kvloom_testkit.devices.simulated import SimulatedDevice
from kvloom_testkit.subjects import SPEC

CHUNK_TOKENS = BLOCK_TOKENS * CHUNK_BLOCKS
CHUNK_BYTES = LAYERS * CHUNK_BLOCKS * ELEMENTS * SPEC.torch_dtype.itemsize


class Packed(Serializer):
    """zlib, decoded on the device by one launch for all, as a codec's kernels do it."""

    type: ClassVar[str] = "packed"
    Config = Config
    hostile: ClassVar[float] = 0.0
    """The part of chunks that are encoded to a stream which is cut off: its checksums are right."""
    chance: ClassVar[random.Random]
    cut: ClassVar[int]
    """The number of those."""
    full: ClassVar[bool]
    """The device has no room for what it decodes from."""
    launches: ClassVar[list[int]]
    """The number of blobs of each launch."""
    wrong: ClassVar[type[Exception]] = CorruptBlobError

    def encode(self, chunk: Chunk) -> Buffers:
        data = zlib.compress(chunk.tensor.view(torch.uint8).flatten().numpy(), 1)
        cut = Packed.chance.random() < Packed.hostile
        Packed.cut += cut
        return [data[: len(data) - 4] if cut else data]

    def decode(self, blob: Buffers, into: Chunk) -> None:
        data = zlib.decompress(b"".join(blob))
        into.tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def decodes_on(self, device: Any) -> bool:
        return device_of(device) is not None

    def decode_many(self, blobs: Sequence[Buffers], into: Sequence[Chunk], place: Place | None = None) -> None:
        device = None if place is None else device_of(place.device)
        if place is None or device is None:
            return super().decode_many(blobs, into)
        if Packed.full:
            raise torch.OutOfMemoryError
        wrong: list[int] = []
        there = [device.empty(len(bytes(blob[0]))) for blob in blobs]

        def launch() -> None:
            for number, (source, chunk) in enumerate(zip(there, into, strict=True)):
                chunk.tensor.fill_(55)
                try:
                    self.decode([bytes(source.numpy())], chunk)
                except zlib.error:
                    wrong.append(number)

        Packed.launches.append(len(blobs))
        with device.on(place.stream):
            for to, blob in zip(there, blobs, strict=True):
                device.copy(to, torch.frombuffer(blob[0], dtype=torch.uint8))
            device.queue(launch)
            place.stream.synchronize()
        if wrong:
            raise Packed.wrong(f"blob {wrong[0]} of {len(blobs)}")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    module = ModuleType("made_here")
    module.kvloom_serializers = hookimpl(lambda: [Packed])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_here", module)
    mine = EntryPoint("made_here", "made_here", "kvloom.v1")
    monkeypatch.setattr(decoding, "MOST_BYTES", 1 << 20)
    Packed.hostile, Packed.full, Packed.launches, Packed.chance, Packed.cut = 0.0, False, [], random.Random(1), 0
    return Registry.discover(entry_points=[*entry_points(group="kvloom.v1"), mine])


def config_of(tier: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    return {
        "connector": {"type": "vllm", "geometry": GEOMETRY, "staging": 4096},
        "chunk_tokens": CHUNK_TOKENS,
        "tiers": [*others, {"serializer": "packed", **tier}],
    }


@pytest.mark.parametrize("hostile", [0.0, 0.2])
def test_no_order_of_work_shows(registry: Registry, hostile: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MOST_BYTES", 3 * 4096)
    Packed.hostile, hits = hostile, 0
    for seed in range(5):  # the device has room for three chunks, and a request four at most
        device = SimulatedDevice(seed)
        with device.installed(), Engine.open(config_of({"type": "dict"}), SPEC, registry=registry) as engine:
            model = Model(seed, engine, device)
            for _ in range(25):
                model.request()
                engine.flush(20)
            device.settle()
            hits += model.hits
    assert hits > 50 and len(Packed.launches) > 25


def stored(engine: Engine, device: SimulatedDevice, chunks: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Tokens of that many chunks, and blank pages for them; they are in the tier."""
    pages = tuple(torch.arange(4 * chunks * ELEMENTS).view(-1, ELEMENTS) % 7 for _ in range(LAYERS))
    pages = tuple(view.to(SPEC.torch_dtype) for view in pages)
    tokens, blocks = torch.arange(chunks * CHUNK_TOKENS), list(range(chunks * CHUNK_BLOCKS))
    assert engine.save(engine.segments(tokens), pages=pages, blocks=blocks).result(20).all() and engine.flush(20)
    device.bus_bytes = 0
    return tokens, {"pages": tuple(torch.full_like(view, 99) for view in pages), "blocks": blocks, "kept": pages}


def load(engine: Engine, tokens: torch.Tensor, where: dict[str, Any]) -> list[bool]:
    """Checks that blocks have what was saved if they were loaded, and else what they had before."""
    here = engine.load(engine.segments(tokens), pages=where["pages"], blocks=where["blocks"]).result(20).tolist()
    for view, kept in zip(where["pages"], where["kept"], strict=True):
        for number, hit in enumerate(here):
            mine = slice(number * CHUNK_BLOCKS, (number + 1) * CHUNK_BLOCKS)
            assert torch.equal(view[mine], kept[mine]) if hit else (view[mine] == 99).all()
    return here


def test_compressed_bytes_go_over_the_bus_and_one_launch_decodes_a_batch(registry: Registry, tmp_path: Path) -> None:
    device = SimulatedDevice(1)
    config = config_of({"type": "disk", "path": str(tmp_path)})
    with device.installed(), Engine.open(config, SPEC, registry=registry) as engine:
        assert not engine.retrieve(torch.arange(CHUNK_TOKENS - 1), pages=(), blocks=[]).any(), "no chunk: no pages"
        tokens, where = stored(engine, device, 8)
        assert load(engine, tokens, where) == [True] * 8
        assert Packed.launches == [8]
        assert 0 < device.bus_bytes < 8 * CHUNK_BYTES / 2


def test_a_request_that_is_larger_than_the_memory_there_is_decoded_there(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that came early keeps the memory from the chunk that everything waits for."""
    monkeypatch.setattr(decoding, "MOST_BYTES", 2 * 4096)
    device = SimulatedDevice(5)
    with device.installed(), Engine.open(config_of({"type": "dict"}), SPEC, registry=registry) as engine:
        tokens, where = stored(engine, device, 9)
        assert load(engine, tokens, where) == [True] * 9
        assert sum(Packed.launches) == 9


def test_where_others_have_filled_the_memory_there_the_processor_decodes(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "MOST_BYTES", 2 * 4096)
    device = SimulatedDevice(6)
    with device.installed(), Engine.open(config_of({"type": "dict"}), SPEC, registry=registry) as engine:
        tokens, where = stored(engine, device, 4)
        assert all(load(engine, tokens, where))
        Packed.launches.clear()
        (decoder,) = engine._stack.stored[0]._reader._decoders_on.values()
        assert decoder is not None
        taken = [decoder.reserve(4096, deadline=inf) for _ in range(3)]
        assert [one is None for one in taken] == [False, False, True]
        assert all(load(engine, tokens, where)) and not Packed.launches
        for one in taken[:2]:
            assert one is not None
            one.abandon()


class Host(VLLMConnector):
    """Its pages are where no device's memory is read."""

    def device(self, where: Any) -> None:
        return None

    def write(self, segments: Any, chunks: Any, **where: Any) -> None:
        assert not any(device_of(chunk.tensor.device).holds(chunk.tensor) for chunk in chunks)  # type: ignore[union-attr]


def test_who_takes_chunks_in_host_memory_does_not_share_what_is_decoded_there(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, began, go = SimulatedDevice(7), Event(), Event()
    with device.installed(), Engine.open(config_of({"type": "dict"}), SPEC, registry=registry) as engine:
        tokens, where = stored(engine, device, 1)
        run, segments = decoding.DeviceDecoder.decode, engine.segments(tokens)

        def held_up(*given: Any) -> None:
            began.set()
            assert go.wait(20)
            run(*given)

        monkeypatch.setattr(decoding.DeviceDecoder, "decode", held_up)
        memory = {"pages": where["pages"], "blocks": where["blocks"]}
        first = engine.load(segments, **memory)
        assert began.wait(20)
        other = engine.load(segments, into=Host(Host.Config(geometry=GEOMETRY, staging=4096), SPEC), **memory)
        assert other.result(20).all()
        go.set()
        assert first.result(20).all()


def test_a_closed_engine_gives_the_memory_back(registry: Registry) -> None:
    device = SimulatedDevice(1)
    with device.installed(), Engine.open(config_of({"type": "dict"}), SPEC, registry=registry) as engine:
        tokens, where = stored(engine, device, 4)
        load(engine, tokens, where)
        (mine,) = [memory for *_, memory in device._memory if memory.numel() == decoding.MOST_BYTES]
        del mine
        engine.close()
        gc.collect()
        assert not any(memory.numel() == decoding.MOST_BYTES for *_, memory in device._memory)


def test_a_memory_tier_wants_the_chunks_itself(registry: Registry) -> None:
    device = SimulatedDevice(1)
    config = config_of({"type": "dict"}, {"type": "memory", "capacity": "1MiB"})
    with device.installed(), Engine.open(config, SPEC, registry=registry) as engine:
        tokens, where = stored(engine, device, 4)
        engine._stack.memory.remove(engine._stack.memory.chunks())
        assert load(engine, tokens, where) == [True] * 4 and not Packed.launches


def test_a_faster_tier_wants_the_chunks_too(registry: Registry) -> None:
    device = SimulatedDevice(1)
    config = config_of({"type": "dict", "name": "far"}, {"type": "dict", "name": "near", "serializer": "packed"})
    with device.installed(), Engine.open(config, SPEC, registry=registry) as engine:
        tokens, where = stored(engine, device, 4)
        assert load(engine, tokens, where) == [True] * 4 and not Packed.launches


@pytest.mark.parametrize("wrong", [CorruptBlobError, UnreadableBlobError])
def test_a_hostile_stream_in_a_batch_costs_its_own_chunk_alone(
    registry: Registry, tmp_path: Path, wrong: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Packed, "wrong", wrong)
    device = SimulatedDevice(2)
    config = config_of({"type": "disk", "path": str(tmp_path)})
    with device.installed(), Engine.open(config, SPEC, registry=registry) as engine:
        Packed.hostile, Packed.chance = 0.4, random.Random(4)
        tokens, where = stored(engine, device, 8)
        assert sum(load(engine, tokens, where)) == 8 - Packed.cut
    assert 0 < Packed.cut < 8


def test_a_full_device_is_a_miss_and_the_blob_stays(registry: Registry, tmp_path: Path) -> None:
    device = SimulatedDevice(3)
    config = config_of({"type": "disk", "path": str(tmp_path)})
    with device.installed(), Engine.open(config, SPEC, registry=registry) as engine:
        tokens, where = stored(engine, device, 4)
        Packed.full = True
        assert not any(load(engine, tokens, where))
        Packed.full = False
        assert all(load(engine, tokens, where))


class BreaksOff(Packed):
    """Queues a copy, and then finds fault with the blob."""

    copied: ClassVar[torch.Tensor]

    def decode_many(self, blobs: Sequence[Buffers], into: Sequence[Chunk], place: Place | None = None) -> None:
        device = None if place is None else device_of(place.device)
        assert device is not None
        BreaksOff.copied = torch.zeros(8, dtype=torch.uint8)
        device.copy(BreaksOff.copied, torch.frombuffer(blobs[0][0], dtype=torch.uint8))
        raise CorruptBlobError("no length that fits")


def test_nothing_uses_the_memory_of_a_blob_that_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MOST_BYTES", 1 << 20)
    for seed in range(8):
        with (device := SimulatedDevice(seed)).installed():
            decoder = decoding.DeviceDecoder(torch.device("cpu"), device, 4096, SystemRuntime())
            chunk = Chunk(torch.zeros(2, 2, 4, 8), MemoryFormat.KV_BLOB, 4)
            job = decoding.Job(BreaksOff(BreaksOff.Config(), SPEC), [bytearray(b"compress")], chunk)
            decoder.decode([job])
            assert isinstance(job.error, CorruptBlobError) and bytes(BreaksOff.copied) == b"compress"
            decoder.close()


def test_a_device_that_fails_is_neither_the_blobs_fault_nor_the_stores(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device = SimulatedDevice(3)
    with device.installed(), Engine.open(config_of({"type": "dict"}), SPEC, registry=registry) as engine:
        tokens, where = stored(engine, device, 4)
        assert all(load(engine, tokens, where))
        (decoder,) = engine._stack.stored[0]._reader._decoders_on.values()
        assert decoder is not None
        with monkeypatch.context() as broken:
            broken.setattr(Packed, "full", True)
            broken.setattr(decoder._stream, "synchronize", failed)
            for _ in range(4):
                where["pages"][0].fill_(99), where["pages"][1].fill_(99)
                assert not any(
                    engine.load(engine.segments(tokens), pages=where["pages"], blocks=where["blocks"]).result(20)
                )
        names = {(key.name, key.reason) for key in engine.counters()}
        assert ("missed", "device failed") in names and not any(name == "tier_paused" for name, _ in names)
        assert all(load(engine, tokens, where))


def test_without_room_for_chunks_on_the_device_the_processor_decodes(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object, **settings: object) -> None:
        raise torch.OutOfMemoryError("not 268435456 bytes")

    device = SimulatedDevice(4)
    with device.installed(), Engine.open(config_of({"type": "dict"}), SPEC, registry=registry) as engine:
        tokens, where = stored(engine, device, 4)
        monkeypatch.setattr(decoding, "Pool", full)
        assert all(load(engine, tokens, where)) and not Packed.launches
