"""K and V that are kept in parts of some heads each: any number of ranks stores them, and any other loads them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from halves_support import LAYERS, MEMORY, NOBODY, PROMPT, Pretended, disk, one_chunks
from vllm_fakes import BLOCK, FakeRequest, kv_cache_config, layer_spec, vllm_config

from kvloom import BackendError, ConfigError, KVSpec, MemoryFormat
from kvloom_connector_vllm.configured import Settings
from kvloom_connector_vllm.identity import Identity, identify_groups
from kvloom_connector_vllm.names import Names
from kvloom_connector_vllm.paged.settings import Geometry
from kvloom_connector_vllm.paged.views import orders_of_parts
from kvloom_connector_vllm.scheduling.announcing import Announcer
from kvloom_connector_vllm.scheduling.messages import Report
from kvloom_connector_vllm.scheduling.plan import Chunks, Group, Scheduled
from kvloom_connector_vllm.scheduling.planner import Planner
from kvloom_connector_vllm.scheduling.scheduler import Scheduler
from kvloom_connector_vllm.worker import Worker

HEADS, SIZE = 4, 8


def identity(model: Path, ranks: int, shards: int, rank: int = 0, *, speculative: Any = None, **spec: Any) -> Identity:
    here = max(1, HEADS // ranks)
    layer = layer_spec(num_kv_heads=here, page_size_bytes=2 * BLOCK * here * SIZE * 4, **spec)
    config = vllm_config(str(model), kv_heads=HEADS, tensor_parallel_size=ranks)
    config.speculative_config = speculative
    known = kv_cache_config(LAYERS, spec=layer)
    (one,) = identify_groups(config, known, rank=rank, about=lambda layer: {}, pages=False, shards=shards)
    return one


def order_in(layout: str, heads: int) -> torch.Tensor:
    """The place of each element (plane, token, head, element) in a page of a layout; `random` is none."""
    axes = {"heads first": (2, 1, 0, 3), "tokens first": (1, 2, 0, 3)}.get(layout)
    elements = 2 * BLOCK * heads * SIZE
    if axes is None:
        return torch.randperm(elements, generator=torch.Generator().manual_seed(heads))
    shape = (2, BLOCK, heads, SIZE)
    page = torch.arange(elements).view([shape[axis] for axis in axes])
    return page.permute([axes.index(axis) for axis in range(4)]).flatten()


class Sharded(Pretended):
    """An engine whose KV of a head is the same whatever rank has it."""

    def __init__(
        self, folder: Path, *, ranks: int, shards: int, layout: str, tiers: Sequence[Any], by_layer: bool = False
    ) -> None:
        self.ranks, self.here = ranks, max(1, HEADS // ranks)
        self.order = order_in(layout, self.here)
        extra = {"config": {
            "chunk_tokens": 2 * BLOCK, "tiers": list(tiers), "connector": {"type": "vllm_blob", "shards": shards},
        }, "async_load": not by_layer, "by_layer": by_layer}  # fmt: skip
        settings = Settings.read(extra, ranks=ranks)
        identities = [identity(folder / "model", ranks, settings.shards, rank) for rank in range(ranks)]
        self.orders = orders_of_parts(self.order, identities[0])
        self._open(settings, identities)

    def page(self, request: FakeRequest, block: int, layer: int, rank: int) -> torch.Tensor:
        first = rank * HEADS // self.ranks
        heads = [self.head(request, block, layer, first + head) for head in range(self.here)]
        page = torch.empty(self.elements)
        page[self.order] = torch.stack(heads, dim=2).flatten()
        return page

    def head(self, request: FakeRequest, block: int, layer: int, head: int) -> torch.Tensor:
        seed = hash((tuple(request.tokens[: (block + 1) * BLOCK]), layer, head))
        return torch.randn(2, BLOCK, SIZE, generator=torch.Generator().manual_seed(seed & 0xFFFFFFFF))


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[Callable[..., Sharded]]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(b"weights")
    with contextlib.ExitStack() as stack:

        def make(ranks: int, shards: int = HEADS, layout: str = "heads first", **more: Any) -> Sharded:
            one = Sharded(tmp_path, ranks=ranks, shards=shards, layout=layout, **{"tiers": [disk(tmp_path)], **more})
            stack.callback(one.close)
            return one

        yield make


def blobs(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "kv").rglob("[0-9]*-*") if path.is_file())


@pytest.mark.parametrize("layouts", [("heads first", "tokens first"), ("random", "random")])
@pytest.mark.parametrize(("ranks", "shards"), [
    ((2, 1), 4), ((2, 4), 4), ((1, 4), 4), ((4, 2), 4), ((1, 8), 4), ((8, 2), 4), ((2, 1), 2), ((1, 2), 2),
])  # fmt: skip
def test_what_some_ranks_stored_others_load(
    sharded: Callable[..., Sharded], tmp_path: Path, ranks: tuple[int, int], shards: int, layouts: tuple[str, str]
) -> None:
    stored, found = (sharded(count, shards, layout) for count, layout in zip(ranks, layouts, strict=True))
    assert stored.serve(FakeRequest("a", PROMPT[:]), range(8)) == 0
    assert len(blobs(tmp_path)) == 3 * shards, "each chunk once for each part, whoever holds it"
    assert found.serve(FakeRequest("b", PROMPT[:]), range(8)) == 24
    assert not found.failed
    assert len(blobs(tmp_path)) == 3 * shards, "and there is nothing to be stored again"


def test_all_parts_of_a_layer_are_there_once_it_was_waited_for(sharded: Callable[..., Sharded]) -> None:
    sharded(2).serve(FakeRequest("a", PROMPT[:]), range(8))
    one, request, there = sharded(1, by_layer=True), FakeRequest("b", PROMPT[:]), list[bool]()

    def see(layer: int) -> None:
        view = one.memory[0][layer]
        there.append(all(torch.equal(view[block], one.page(request, block, layer, 0)) for block in range(6)))

    one.see_layer = see
    assert one.serve(request, range(8)) == 24
    assert there[:LAYERS] == [True] * LAYERS


def test_memory_has_every_part_of_a_chunk_or_it_is_no_hit(sharded: Callable[..., Sharded]) -> None:
    one = sharded(2, tiers=[MEMORY])
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    assert one.serve(FakeRequest("b", PROMPT[:]), range(8, 16)) == 24
    second = one.parts[1][1].names.segments(one_chunks(one, PROMPT))[1]
    one.engines[1].tiers["memory"].remove([second.key])
    one.step_until(lambda: one.matched(FakeRequest("d", PROMPT[:])) == 8)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("gone", [True, False])
def test_a_part_that_does_not_come_is_computed(
    sharded: Callable[..., Sharded], tmp_path: Path, ranks: int, gone: bool
) -> None:
    sharded(2).serve(FakeRequest("a", PROMPT[:]), range(8))
    path = next(path for path in reversed(blobs(tmp_path)) if path.name.startswith("1-"))
    if gone:
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    one = sharded(ranks)
    assert one.serve(FakeRequest("b", PROMPT[:]), range(8)) == 8
    assert one.serve(FakeRequest("c", PROMPT[:]), range(8, 16)) == 24, "and kept again"


@pytest.mark.parametrize("verb", ["load", "save"])
def test_nothing_is_over_before_its_last_part(
    sharded: Callable[..., Sharded], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    sharded(2).serve(FakeRequest("a", PROMPT[:]), range(8))
    one, go_on, request = sharded(1), threading.Event(), FakeRequest("b", PROMPT[:])
    (worker,), last = one.workers, one.parts[0][-1].engine
    work = getattr(last, verb)
    monkeypatch.setattr(last, verb, lambda *args, **where: (go_on.wait(20), work(*args, **where))[1])
    if verb == "load":
        one.scheduler.load(request, [range(8)], one.matched(request))
        one.step()
        first = worker._loads["b"][0]
    else:
        one.scheduler.begin(request, NOBODY)
        one.step([Scheduled("b", [range(8)], True, 0, 27)], lambda: one.compute(request, range(8), 0, 27))
        first = next(iter(worker._saves.values()))[0]
    one.step_until(first.over.is_set)
    assert one.step() == set() and (worker._loads or one.scheduler.busy)
    go_on.set()
    assert verb == "save" or one.step_until_over() == {"b"}
    one.settle()
    assert one.right(request, range(8), 24)


def test_routers_are_told_once_of_a_chunk_of_several_parts(sharded: Callable[..., Sharded]) -> None:
    one = sharded(1, tiers=[MEMORY])
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    assert [each.what for each in one.scheduler.announcements() if each.medium == "CPU"] == ["stored"] * 3


def test_routers_are_told_of_the_first_groups_chunks_by_the_first_rank_that_has_its_layers() -> None:
    def named(rank: int, layers: int) -> Names:
        spec = KVSpec("m", layers, 1, 1, "float32", world_size=2, rank=rank)
        geometry = Geometry(layers=layers, block_tokens=BLOCK, page_elements=1)
        return Names(spec, geometry, MemoryFormat.KV_PAGES, chunk_tokens=BLOCK)

    full, window, request = named(1, 1), [named(rank, 2) for rank in range(2)], FakeRequest("a", PROMPT[:BLOCK])
    chunks = Chunks(NOBODY, 0, tuple(request.block_hashes))
    keys = [names.segments(chunks)[0].key for names in (full, *window)]
    for ranks, came in (
        ([[[full], [window[1]]]], {0: [keys[0], keys[2]]}),
        ([[[], [window[0]]], [[full], [window[1]]]], {0: [keys[1]], 1: [keys[0], keys[2]]}),
    ):
        announcer = Announcer(chunk_tokens=BLOCK, hash_tokens=BLOCK)
        announcer.learn(request, chunks)
        groups = [Group(BLOCK, BLOCK), Group(BLOCK, BLOCK, window=8)]
        scheduler = Scheduler(Planner(groups, hash_tokens=BLOCK, save_generated=True), ranks, None, announcer)
        scheduler.report(Report(came=came, loaded={"another"}))
        scheduler.report(Report(left={rank: some[-1:] for rank, some in came.items()}))
        assert [each.what for each in scheduler.announcements()] == ["stored"]


def test_closing_writes_what_every_part_saved_whichever_engine_is_first(
    sharded: Callable[..., Sharded], tmp_path: Path
) -> None:
    one, request = sharded(1), FakeRequest("a", PROMPT[:])
    (worker,) = one.workers = [Worker([one.parts[0][::-1]], rank=0)]
    worker.attach(one.memory[0], orders=one.orders[::-1])
    one.scheduler.begin(request, NOBODY)
    one.step([Scheduled("a", [range(8)], True, 0, 27)], lambda: one.compute(request, range(8), 0, 27))
    worker.close()
    assert len(blobs(tmp_path)) == 3 * HEADS
    for part in one.parts[0]:
        with pytest.raises(BackendError, match="closed"):
            part.engine.sibling(part.engine.spec)


def test_a_draft_model_whose_heads_are_copied_otherwise_is_refused(tmp_path: Path) -> None:
    def draft(heads: int) -> Any:
        other = vllm_config(str(tmp_path), kv_heads=heads).model_config
        return SimpleNamespace(method="draft_model", draft_model_config=other)

    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert identity(tmp_path, 8, 4, rank=1, speculative=draft(HEADS)).spec.rank == 0
    assert identity(tmp_path, 4, 4, rank=1, speculative=draft(2 * HEADS)).spec.rank == 1
    with pytest.raises(ValueError, match=r"connector\.shards: .*draft"):
        identity(tmp_path, 8, 4, rank=1, speculative=draft(2 * HEADS))
    identity(tmp_path, 8, 0, rank=1, speculative=draft(2 * HEADS))


def test_parts_of_another_number_or_of_ranks_have_other_names(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")

    def fingerprints(ranks: int, shards: int) -> set[str]:
        found = [identity(tmp_path, ranks, shards, rank) for rank in range(ranks)]
        return {
            Names(spec, one.geometry, MemoryFormat.KV_BLOB, chunk_tokens=8).namespace(NOBODY)
            for rank, one in enumerate(found) for spec in one.of_rank(rank)
        }  # fmt: skip

    assert fingerprints(1, 4) == fingerprints(2, 4) == fingerprints(4, 4) == fingerprints(8, 4)
    assert len(fingerprints(1, 4)) == 4
    assert fingerprints(1, 2) == fingerprints(2, 2) and not fingerprints(2, 2) & fingerprints(2, 4)
    assert not fingerprints(2, 2) & fingerprints(2, 0), "exact to the last bit, and computed by as many ranks"
    assert not fingerprints(4, 0) & fingerprints(4, 4)


@pytest.mark.parametrize(("ranks", "shards", "fit"), [(1, 3, "1, 2, 4"), (4, 2, "4"), (2, 1, "2, 4"), (8, 8, "4")])
def test_parts_that_cannot_be_are_refused_with_those_that_can(
    tmp_path: Path, ranks: int, shards: int, fit: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(ValueError, match=rf"connector\.shards: .*write one of {fit}$"):
        identity(tmp_path, ranks, shards)


@pytest.mark.parametrize(("connector", "said"), [
    ({"type": "vllm", "shards": 2}, "connector.shards: opaque pages are only of use to as many ranks"),
    ({"type": "vllm_blob", "shards": "two"}, "connector.shards: expected a number"),
    ({"type": "vllm_blob", "shards": -1}, "connector.shards: expected a number"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(connector: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Settings.read({"config": {"connector": connector}}, ranks=1)
