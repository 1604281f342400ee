"""Requirements of connectors that serve several requests on several threads, in a process that is not theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvloom import Chunk, GPUConnector, Segment
from kvloom_testkit.connectors.memories import ConnectorHarness, EngineMemory, done, fill, layer_of, same
from kvloom_testkit.process_state import left_as_it_is
from kvloom_testkit.requirements import claims
from kvloom_testkit.running import together

Opened = Callable[[], ConnectorHarness]


class SharingRequirements:
    """Mixed into `ConnectorConformance`."""

    def test_C15_requests_do_not_meet(self, opened: Opened) -> None:
        """Arguments of one request do not affect the next: alternating calls for two requests move the KV of each, also
        if the next page table is the same tensor with other pages, or reuses the last one's memory.

        Why: one connector serves all requests of an engine, which reuses its tensors.

        Usually: a page table, or a result computed from it, is kept from the first call, for ever or by `id`.
        """
        it = opened()
        sources = [it.engine(seed=seed) for seed in (1, 2)]
        targets = [it.engine(blank=True) for _ in sources]
        segments = it.segments(8, 8, 8, 8, 8)
        for segment in segments:
            for source, target in zip(sources, targets, strict=True):
                it.connector.check(source.where, segment.end)
                it.write([segment], it.read([segment], source), target)
        for source, target in zip(sources, targets, strict=True):
            assert same(target.kv(), source.kv())
        _check_page_tables_written_anew(it)
        for number in range(12):  # as likely as not, the tensors of one are where those of the one before were
            num_tokens = it.num_tokens + number % 3 * it.page_tokens
            source = it.engine(seed=number, num_tokens=num_tokens)
            _check_moves(it, source, "after others, with tensors of its own")
            del source

    def test_C16_two_requests_at_once(self, opened: Opened) -> None:
        """Calls for two requests on two threads at once move the KV of each.

        Why: a request is served by one thread at a time, and several requests by several threads.

        Usually: a staging buffer is kept on the instance.
        """
        it = opened()

        def serve(source: EngineMemory) -> None:
            kv, segments = source.kv(), it.segments(16, 16, 8)
            for _ in range(8):
                target = it.engine(blank=True)
                it.write(segments, it.read(segments, source), target)
                assert same(target.kv(), kv)

        sources = [it.engine(seed=seed) for seed in range(3)]
        together(*(lambda source=source: serve(source) for source in sources))  # type: ignore[misc]

    def test_C17_engines_in_inference_mode(self, opened: Opened) -> None:
        """KV made in inference mode is read and written by a thread that is not in it.

        Why: engines compute under `torch.inference_mode`, which applies to a thread, and the core uses other threads.

        Usually: it was not considered: torch refuses to write to such a tensor outside of inference mode.
        """
        it = opened()
        with torch.inference_mode():
            source, target = it.engine(seed=1), it.engine(blank=True)
        segments = it.segments(16, 16, 8)
        it.connector.check(target.where, segments[-1].end)
        chunks = it.read(segments, source)
        it.write(segments, chunks, target)
        with torch.inference_mode():
            assert same(target.kv(), source.kv())
            fill(target, seed=None)
        if claims(it.connector, "write_layer", GPUConnector):
            _write_layers(it, segments, chunks, target)
            with torch.inference_mode():
                assert same(target.kv(), source.kv()), "layer by layer"
        for chunk in chunks:
            chunk.tensor.zero_()  # the next one's: no inference tensor itself

    def test_C18_leaves_the_process_as_it_is(self, opened: Opened) -> None:
        """Moving KV changes neither logging, signals and warnings, nor random numbers, nor the settings of torch.

        Why: it runs beside a model, which depends on these settings.

        Usually: gradients are switched off for good, or the number of torch's threads is set.
        """
        source, target = opened().engine(), opened().engine(blank=True)
        with left_as_it_is():
            it = opened()
            segments = it.segments(16, 16)
            it.connector.check(source.where, segments[-1].end)
            it.write(segments, it.read(segments, source), target)
            it.connector.close()


def _write_layers(
    it: ConnectorHarness, segments: Sequence[Segment], chunks: Sequence[Chunk], memory: EngineMemory
) -> None:
    for layer in range(it.spec.num_layers):
        done(it.connector.write_layer(layer, segments, [layer_of(chunk, layer) for chunk in chunks], **memory.where))


def _check_page_tables_written_anew(it: ConnectorHarness) -> None:
    memory = it.engine(seed=3)
    _check_moves(it, memory, "before its pages were changed")
    for seed in (4, 5):
        if not memory.move():
            return
        fill(memory, seed=seed)
        _check_moves(it, memory, "after the engine had written other pages into its table")


def _check_moves(it: ConnectorHarness, memory: EngineMemory, when: str) -> None:
    """The connector reads what the memory holds, and then writes other KV into all of it and nowhere else."""
    segments, around = it.segments(16, 16, 8), memory.surroundings()
    kv = memory.kv()
    chunks = it.read(segments, memory)
    fill(memory, seed=None)
    expected = memory.kv()
    it.write(segments, chunks, memory)
    for segment in segments:
        it.part(expected, segment).copy_(it.part(kv, segment))
    assert same(memory.kv(), expected), when
    if claims(it.connector, "write_layer", GPUConnector):
        fill(memory, seed=None)
        _write_layers(it, segments, chunks, memory)
        assert same(memory.kv(), expected), f"{when}, layer by layer"
    if claims(it.connector, "read_layer", GPUConnector):
        again = it.chunks(segments)
        for layer in range(it.spec.num_layers):
            done(it.connector.read_layer(layer, segments, [layer_of(c, layer) for c in again], **memory.where))
        assert all(same(one.tensor, two.tensor) for one, two in zip(again, chunks, strict=True)), f"{when}, by layers"
    assert memory.surroundings() == around, f"{when}: what belongs to others was changed"
