"""Requirements of a store that several machines share, for classes of tests with these fixtures.

`tier`: its settings as in YAML; for versions, on a place of its own. `store`: a backend at the same place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reliability_children import later_version_on, processes, prompt, versions_in
from reliability_support import GENEROUS_SECONDS, WIDE, events, open_engine, retrieved, same_bits, tokens_of

from kvloom import KVSpec, StorageBackend, envelope

CODECS: dict[str, Any] = {
    "raw": "raw",
    "lossless": {"type": "cachegen", "mode": "lossless"},
    "cachegen": "cachegen",
}
DEEP = KVSpec(model="deep", num_layers=24, num_kv_heads=8, head_size=64, dtype="bfloat16")
"""48 KiB of KV for each token."""
SIZES = {"192KiB": (DEEP, 4), "6MiB": (DEEP, 128)}
"""Spec and tokens by the size of a raw chunk. The larger one is loaded by layers with reads of ranges."""
CHUNKS = 2


def smooth_kv(spec: KVSpec, count: int) -> torch.Tensor:
    """KV that codecs can do something with."""
    generator = torch.Generator().manual_seed(count)
    shape = spec.blob_shape(count)
    steps = torch.randn(shape, generator=generator) / 8
    return (torch.randn(shape[-1], generator=generator) + steps.cumsum(2) / 4).to(spec.torch_dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("codec", CODECS)
class CodecsOnAStore:
    """Blobs of each codec in several sizes: written by one engine, read by others and by the backend."""

    def test_blobs_come_back_whole_by_range_and_by_layer(
        self, tier: dict[str, Any], store: StorageBackend, codec: str, size: str
    ) -> None:
        spec, chunk = SIZES[size]
        tokens, kv = tokens_of(CHUNKS * chunk, 1), smooth_kv(spec, CHUNKS * chunk)
        serializer = {"serializer": CODECS[codec]}
        settings: dict[str, Any] = {"spec": spec, "chunk_tokens": chunk, "salt": codec}
        with open_engine({"type": "dict", **serializer}, **settings) as engine:  # what is right: no store, no layers
            engine.store(tokens, kv=kv)
            assert engine.flush(GENEROUS_SECONDS)
            right = torch.zeros_like(kv)
            assert engine.retrieve(tokens, kv=right).all()
        assert same_bits(right, kv) is (codec != "cachegen")
        with open_engine(tier | serializer, **settings) as engine:
            keys = [str(segment.key) for segment in engine.segments(tokens)]
            engine.store(tokens, kv=kv)
            assert engine.flush(GENEROUS_SECONDS)
        for key, blob in zip(keys, store.get_many(keys), strict=True):
            assert blob is not None
            read_in_parts(store, key, bytes(blob), codec)
        with open_engine(tier | serializer, **settings) as engine:
            assert retrieved(engine, tokens, right) == len(tokens)
            got = torch.zeros_like(kv)
            with engine.retrieve_layer(tokens, kv=got) as loading:
                for layer in range(spec.num_layers):
                    assert loading.wait(layer).all()
                    assert same_bits(got[:, layer], right[:, layer])
            assert events(engine, "corrupt") == events(engine, "tier_error") == 0


def read_in_parts(store: StorageBackend, key: str, whole: bytes, codec: str) -> None:
    """The blob as one, and each of its buffers as a range: the same bytes, under the same checksums."""
    assert bytes(store.get(key) or b"") == whole
    header = envelope.parse(memoryview(whole), key=key)
    assert header is not None and header.description.serializer == ("raw" if codec == "raw" else "cachegen")
    offset = header.header_bytes
    for number, length in enumerate(header.lengths):
        part = memoryview(bytearray(length))
        assert store.get_range(key, offset, part) and part == whole[offset : offset + length]
        assert header.right(number, part), "another checksum"
        offset += length
    assert offset == len(whole) and not store.get_range(key, offset - 1, memoryview(bytearray(2))), "beyond the end"


class TwoVersionsOnAStore:
    """As on a disk: the other version's blobs are plain misses, and stay."""

    def test_processes_of_two_versions_share_it_in_peace(self, tier: dict[str, Any], store: StorageBackend) -> None:
        mine, theirs = processes.Pipe()
        child = processes.Process(target=later_version_on, args=(tier, theirs), daemon=True)
        child.start()

        def other(verb: str, seed: int) -> int | bool:
            mine.send((verb, seed))
            assert mine.poll(GENEROUS_SECONDS)
            return mine.recv()  # type: ignore[no-any-return]

        memory = {"type": "memory", "capacity": "6MiB"}
        with open_engine(memory, tier, spec=WIDE, chunk_tokens=32) as engine:
            there: dict[str, int] = {}
            for turn in range(9):
                tokens, kv = prompt(turn)
                if turn % 3 == 0:  # the other version has it first
                    assert other("store", turn)
                    assert retrieved(engine, tokens, kv) == 0, "a plain miss"
                    engine.store(tokens, kv=kv)
                    assert engine.flush(GENEROUS_SECONDS)
                elif turn % 3 == 1:  # this one does, and the other can read it
                    engine.store(tokens, kv=kv)
                    assert engine.flush(GENEROUS_SECONDS)
                    assert other("retrieve", turn) == len(tokens)
                    assert other("store", turn)
                else:
                    assert other("store", turn)
                now = versions_in(store)
                assert there.items() <= now.items(), "neither deletes or replaces the other's"
                there = now
                assert other("retrieve", turn) == len(tokens)
            assert set(there.values()) == {envelope.PLAIN_VERSION, envelope.VERSION + 1}
            assert events(engine, "corrupt") == events(engine, "tier_error") == 0
            tokens, kv = prompt(0)
            engine.remove(tokens)  # an operator means all of it
            assert len(versions_in(store)) == len(there) - len(engine.segments(tokens))
        mine.send(None)
        child.join(GENEROUS_SECONDS)
        assert child.exitcode == 0
