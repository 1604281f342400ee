"""Requirements of GPU connectors. See `ConnectorConformance`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvloom import GPUConnector, MemoryFormat, canonical_json, fingerprint
from kvloom_testkit.chunks import POISONS
from kvloom_testkit.conformance import Conformance
from kvloom_testkit.connectors.devices import DeviceRequirements
from kvloom_testkit.connectors.layers import LayerRequirements
from kvloom_testkit.connectors.memories import ConnectorHarness, done, raw, same
from kvloom_testkit.connectors.sharing import SharingRequirements

Opened = Callable[[], ConnectorHarness]
SAME_SIZE = {
    "float64": "float32",  # no other dtype has its size
    "float32": "float64",
    "float16": "bfloat16",
    "bfloat16": "float16",
    "float8_e4m3fn": "float8_e5m2",
    "float8_e5m2": "float8_e4m3fn",
    "int8": "uint8",
    "uint8": "int8",
}
"""Dtypes with elements of equal size, where there are any."""


class ConnectorConformance(LayerRequirements, SharingRequirements, DeviceRequirements, Conformance):
    """Requirements of a `GPUConnector`.

    `make` is a function that returns a `ConnectorHarness` with a new connector each time it is called: the connector,
    and a function that makes an engine's memory for it, which the tests fill and read themselves.
    """

    kind = "connector"
    contract = GPUConnector
    needs_harness = True

    @staticmethod
    def component_of(made: Any) -> Any:
        return made.connector

    def test_C01_reading_gives_the_kv_of_the_engine(self, opened: Opened) -> None:
        """`read` fills each chunk with the KV of its segment, bit for bit; for pages, with all their content.

        Why: these bytes are stored.

        Usually: K and V are swapped, the place is off by one, or a conversion changes values.
        """
        it = opened()
        memory = it.engine()
        segments, kv = it.segments(16, 16, 5), memory.kv()
        first, second = it.read(segments, memory), it.read(segments, memory, poison=POISONS[0])
        for segment, chunk, again in zip(segments, first, second, strict=True):
            assert same(chunk.tensor, again.tensor), f"{segment[:2]}: not all of the chunk was filled"
            if it.connector.format is MemoryFormat.KV_BLOB:
                assert same(chunk.tensor, it.part(kv, segment)), f"{segment[:2]}"

    def test_C02_writing_puts_it_where_it_belongs(self, opened: Opened) -> None:
        """`write` puts each chunk into the engine's KV of its segment, bit for bit.

        Why: the model continues from this KV.

        Usually: K and V are swapped, the place is off by one, or a conversion changes values.
        """
        it = opened()
        source, target = it.engine(), it.engine(blank=True)
        segments, kv = it.segments(16, 16, 5), source.kv()
        chunks = it.chunks(segments)
        if it.connector.format is MemoryFormat.KV_BLOB:
            for segment, chunk in zip(segments, chunks, strict=True):
                chunk.tensor.copy_(it.part(kv, segment))
        else:
            chunks = it.read(segments, source)
        it.write(segments, chunks, target)
        for segment in segments:
            assert same(it.part(target.kv(), segment), it.part(kv, segment)), f"{segment[:2]}"

    def test_C03_nothing_else_is_written_to(self, opened: Opened) -> None:
        """Writing a segment changes that segment's KV: no token beside it, no other request, no page table.

        Why: the neighbouring memory belongs to another request, which would continue with wrong KV.

        Usually: a slot is off by one, a whole page is written for a part of it, or a view is larger than it should be.
        """
        it = opened()
        for start, size in ((0, 1), (7, 1), (13, 6), (16, 16), (39, 1)):
            source, target = it.engine(seed=1), it.engine(seed=2)
            expected, around = target.kv(), target.surroundings()
            segments = it.segments(size, start=start)
            it.write(segments, it.read(segments, source), target)
            it.part(expected, segments[0]).copy_(it.part(source.kv(), segments[0]))
            assert same(target.kv(), expected), f"of {segments[0][:2]}: KV of other tokens was changed, or not this"
            assert target.surroundings() == around, f"of {segments[0][:2]}: what belongs to others was changed"

    def test_C04_what_is_read_can_be_written_elsewhere(self, opened: Opened) -> None:
        """Reading from one engine and writing to another, by another instance, makes the KV of both the same.

        Why: another process continues, with other pages.

        Usually: a chunk holds addresses or pages of the engine that it came from.
        """
        reader, writer = opened(), opened()
        source, target = reader.engine(), writer.engine(blank=True)
        segments = reader.segments(16, 16, 8)
        chunks = reader.read(segments, source)
        kv = source.kv()
        source.set_kv(torch.zeros_like(kv))
        writer.write(segments, chunks, target)
        assert same(target.kv(), kv)

    def test_C05_many_at_once_are_the_same_as_one_by_one(self, opened: Opened) -> None:
        """Many segments in one call, of any length and with gaps, are moved as if one by one; so are long ones.

        Why: one call moves all segments that were found, and some may be missing in between.

        Usually: all are taken to be as long as the first, or to lie side by side; or a kernel's limit on segments or
        tokens is ignored.
        """
        it = opened()
        source = it.engine()
        for segments in (it.segments(4, 9, 1, 3, gap=2), it.segments(8, 8, 8), it.segments(5, 2, start=21, gap=1)):
            whole = it.read(segments, source)
            single = [it.read([segment], source)[0] for segment in reversed(segments)][::-1]
            assert all(same(a.tensor, b.tensor) for a, b in zip(whole, single, strict=True)), "read"
            together_, one_by_one = it.engine(blank=True), it.engine(blank=True)
            it.write(segments, whole, together_)
            for segment, chunk in zip(segments, whole, strict=True):
                it.write([segment], [chunk], one_by_one)
            assert same(together_.kv(), one_by_one.kv()), "write"
        for sizes, gap, pages in (((1,) * 300, 1, 600), ((1100, 700), 0, 1800)):
            large, target = (it.engine(seed=seed, num_tokens=pages * it.page_tokens) for seed in (1, 2))
            segments = it.segments(*sizes, gap=gap)
            kv, expected = large.kv(), target.kv()
            for segment in segments:
                it.part(expected, segment).copy_(it.part(kv, segment))
            it.write(segments, it.read(segments, large), target)
            assert same(target.kv(), expected), f"{len(sizes)} segments of {sizes[0] * it.page_tokens} tokens and so on"

    def test_C06_what_is_copied_from_stays_as_it_is(self, opened: Opened) -> None:
        """`read` changes nothing in the engine, and `write` nothing in the chunks, nor do they change their arguments.

        Why: the engine continues to use its KV, and the chunks are shared.

        Usually: values are scaled in place, or the caller's list is sorted.
        """
        it = opened()
        memory, segments = it.engine(), it.segments(16, 5)
        kv, around, given = memory.kv(), memory.surroundings(), list(segments)
        chunks = it.read(segments, memory)
        assert same(memory.kv(), kv) and memory.surroundings() == around, "read changed the engine's memory"
        before, where = [raw(chunk.tensor) for chunk in chunks], dict(memory.where)
        target = it.engine(blank=True)
        it.write(segments, chunks, target)
        assert all(map(torch.equal, (raw(chunk.tensor) for chunk in chunks), before)), "write changed the chunks"
        assert segments == given and list(memory.where) == list(where)

    def test_C07_what_it_cannot_work_on_is_refused(self, opened: Opened) -> None:
        """`check` accepts what fits, and raises ValueError if something is missing, unknown, too short or of another
        model's dtype or shape. It also rejects tensors with another number of dimensions, fractions as indices, and
        indices below 0 or beyond the memory, at any place that is used.

        Why: it is the last check of the caller's arguments before memory is read and written. Engines pad tables with
        the index -1, which torch takes for the last place.

        Usually: `check` is missing, tests only one of the tensors or indices, tests only the largest index, or confuses
        dtypes of the same size.
        """
        it = opened()
        count, fits = it.num_tokens, it.engine().where
        it.connector.check(fits, count)
        it.connector.check(fits, it.page_tokens)
        it.connector.check(it.engine(num_tokens=it.page_tokens).where, it.page_tokens)
        spec = it.spec
        dtypes = ("float32" if spec.dtype != "float32" else "bfloat16", SAME_SIZE[spec.dtype])
        bad = {
            "nothing": {},
            "what has room for fewer tokens": it.engine(num_tokens=count - it.page_tokens).where,
            "a name that it does not know": {**fits, "no_such_argument": 1},
            **{f"KV of {dtype}": it.memory(replace(spec, dtype=dtype), count).where for dtype in dtypes},
            "KV of more layers": it.memory(replace(spec, num_layers=spec.num_layers + 1), count).where,
            "KV of fewer layers": it.memory(replace(spec, num_layers=spec.num_layers - 1), count).where,
            "KV of larger heads": it.memory(replace(spec, head_size=2 * spec.head_size), count).where,
            "KV of smaller heads": it.memory(replace(spec, head_size=spec.head_size // 2), count).where,
            **{f"no tensor in {name}": {**fits, name: "nonsense"} for name in fits},
        }
        for name, tensor in fits.items():
            if isinstance(tensor, torch.Tensor):
                bad[f"a dimension more in {name}"] = {**fits, name: tensor[..., None]}
                bad[f"a dimension less in {name}"] = {**fits, name: tensor[0]}
                if tensor.dtype in (torch.int32, torch.int64):
                    bad[f"fractions in {name}"] = {**fits, name: tensor.double()}
                    bad |= it.indices_out_of_range(name)
        for name, where in bad.items():
            try:
                it.connector.check(where, count)
            except ValueError:
                continue
            pytest.fail(f"check accepted {name}")

    def test_C08_it_says_what_its_chunks_look_like(self, opened: Opened) -> None:
        """`format` is a MemoryFormat, and `shape` the shape of a chunk: of KV_BLOB, `[planes, layers, tokens, hidden]`.

        Why: memory is reserved by it, and stored chunks with another shape are refused.

        Usually: K and V come after the layers, or heads have a dimension of their own.
        """
        it = opened()
        assert isinstance(it.connector.format, MemoryFormat)
        for pages in (1, 5, 16):
            count = pages * it.page_tokens
            shape = tuple(it.connector.shape(count))
            assert all(type(size) is int and size > 0 for size in shape), f"{shape}"
            assert tuple(opened().connector.shape(count)) == shape
            if it.connector.format is MemoryFormat.KV_BLOB:
                assert shape == it.spec.blob_shape(count)
            else:
                assert math.prod(shape) == pages * math.prod(it.connector.shape(it.page_tokens)), "pages of one size"

    def test_C09_when_a_fence_was_waited_for_it_is_done(self, opened: Opened) -> None:
        """`read` and `write` return None when they are done, or a fence whose `wait` returns when they are. `wait` may
        be called twice, and several fences may be waited for in any order.

        Why: right after that the chunk is given back, or the engine continues.

        Usually: copies are queued on a stream without waiting for it.
        """
        it = opened()
        source, target = it.engine(), it.engine(blank=True)
        segments = it.segments(16, 16)
        expected = it.read(segments, source)
        chunks = it.chunks(segments)
        reads = [it.connector.read([s], [c], **source.where) for s, c in zip(segments, chunks, strict=True)]
        for fence in [*reads[::-1], *reads]:
            done(fence)
        assert all(same(a.tensor, b.tensor) for a, b in zip(chunks, expected, strict=True)), "read"
        writes = [it.connector.write([s], [c], **target.where) for s, c in zip(segments, chunks, strict=True)]
        for fence in [*writes, *writes[::-1]]:
            done(fence)
        assert all(same(it.part(target.kv(), each), it.part(source.kv(), each)) for each in segments), "write"

    def test_C12_its_representation_is_json(self, opened: Opened) -> None:
        """`representation` has JSON values, always the same ones, in every instance.

        Why: it is part of the fingerprint; if it changed, no stored KV would be found.

        Usually: it contains an address, a device number or a dtype.
        """
        it, other = opened(), opened()
        text = canonical_json(dict(it.connector.representation))
        it.read(it.segments(4), it.engine())
        assert canonical_json(dict(it.connector.representation)) == text
        assert canonical_json(dict(other.connector.representation)) == text
        fingerprint(it.spec, it.connector.format, it.connector.representation)

    def test_C13_the_last_segment_may_be_short(self, opened: Opened) -> None:
        """Segments of any length are moved in full, also the shortest, up to the last token that fits.

        Why: the token database decides where segments end.

        Usually: lengths are rounded to a multiple of a kernel or page size.
        """
        it = opened()
        for size in (1, 2, 3, 13, 39):
            source, target = it.engine(seed=size), it.engine(blank=True)
            segments = it.segments(40 - size, size)
            expected = target.kv()
            it.write(segments[1:], it.read(segments[1:], source), target)
            it.part(expected, segments[1]).copy_(it.part(source.kv(), segments[1]))
            assert same(target.kv(), expected), f"a last segment of {size}"

    def test_C14_closing_twice_is_fine(self, opened: Opened) -> None:
        """`close` may be called twice, also on an instance that was never used.

        Why: an engine that fails to open closes what it has, and then its owner closes the engine.

        Usually: the resource is set to None, and then closed again.
        """
        used = opened()
        used.read(used.segments(4), used.engine())
        for one in (used, opened()):
            one.connector.close()
            one.connector.close()
