"""The scheduler's and the workers' halves together, over real tiers, beside an engine that is only pretended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_fakes import BLOCK, FakeRequest, kv_cache_config, vllm_config

from kvloom import Engine, MemoryFormat
from kvloom_connector_vllm.announcing import Announcer
from kvloom_connector_vllm.configured import Settings, has_shared_tier
from kvloom_connector_vllm.identity import identify
from kvloom_connector_vllm.names import Names
from kvloom_connector_vllm.planner import Owner, Planner, Scheduled
from kvloom_connector_vllm.scheduler import Report, Scheduler
from kvloom_connector_vllm.worker import Worker

NOBODY = Owner()
BLOCKS = 24
LAYERS = 3


class Pretended:
    """An engine of `ranks` ranks whose KV of a token is a digest of everything up to it, the layer and the rank."""

    def __init__(self, folder: Path, *, tiers: Sequence[Any], ranks: int = 1, asynchronous: bool = True, **config: Any):
        known = kv_cache_config(LAYERS, num_blocks=BLOCKS)
        vllm = vllm_config(str(folder / "model"), tensor_parallel_size=ranks)
        identities = [identify(vllm, known, rank=rank, about={}) for rank in range(ranks)]
        extra = {"config": {"chunk_tokens": 2 * BLOCK, "tiers": list(tiers), **config}, "async_load": asynchronous}
        settings = Settings.read(extra, ranks=ranks)
        opened = settings.opened(identities[0].geometry)
        self.elements = identities[0].geometry.page_elements
        names = [Names(one.spec, one.geometry, MemoryFormat.KV_PAGES, chunk_tokens=2 * BLOCK) for one in identities]
        planner = Planner(
            block_tokens=BLOCK, chunk_tokens=2 * BLOCK, hash_tokens=BLOCK,
            save_generated=opened.save_decode_cache,
        )  # fmt: skip
        self.index = None
        if has_shared_tier(opened):
            self.index = Engine.open(opened, identities[0].spec, role="index")
        announcer = Announcer(chunk_tokens=2 * BLOCK, hash_tokens=BLOCK)
        self.scheduler = Scheduler(planner, names, self.index, announcer, asynchronous=asynchronous)
        self.engines = [Engine.open(opened, one.spec) for one in identities]
        self.workers = [
            Worker(engine, name, rank=rank, block_tokens=BLOCK, asynchronous=asynchronous)
            for rank, (engine, name) in enumerate(zip(self.engines, names, strict=True))
        ]
        self.memory = [[torch.zeros(BLOCKS, self.elements) for _ in range(LAYERS)] for _ in range(ranks)]
        for worker, pages in zip(self.workers, self.memory, strict=True):
            worker.attach(pages)
        self.asynchronous = asynchronous
        self.failed: set[int] = set()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def page(self, request: FakeRequest, block: int, layer: int, rank: int) -> torch.Tensor:
        """What a page of a request's KV is, in float32 so that every bit counts."""
        seed = hash((tuple(request.tokens[: (block + 1) * BLOCK]), request.cache_salt, layer, rank))
        return torch.randn(self.elements, generator=torch.Generator().manual_seed(seed & 0xFFFFFFFF))

    def compute(self, request: FakeRequest, table: Sequence[int], first: int, last: int) -> None:
        for rank, pages in enumerate(self.memory):
            for layer, view in enumerate(pages):
                for block in range(first // BLOCK, last // BLOCK):
                    view[table[block]] = self.page(request, block, layer, rank)

    def right(self, request: FakeRequest, table: Sequence[int], tokens: int) -> bool:
        return all(
            torch.equal(view[table[block]], self.page(request, block, layer, rank))
            for rank, pages in enumerate(self.memory)
            for layer, view in enumerate(pages)
            for block in range(tokens // BLOCK)
        )

    def step(self, scheduled: Sequence[Scheduled] = (), compute: Any = lambda: None) -> set[str]:
        """One step of everybody; the requests whose loads are over on every rank."""
        orders = self.scheduler.orders(scheduled)
        over: list[set[str]] = []
        for worker in self.workers:
            worker.fence(orders)
            worker.begin(orders)
            if not self.asynchronous:
                worker.load(wait=True)
        compute()
        report = Report()
        for worker in self.workers:
            if self.asynchronous:
                worker.load(wait=False)
            worker.save()
            over.append(worker.finished())
            self.failed |= worker.failed_blocks()
            said = worker.report()
            report = report if said is None else report.add(said)
        self.scheduler.report(report)
        return set.intersection(*over) if over else set()

    def matched(self, request: FakeRequest, local: int = 0) -> int:
        until = time.monotonic() + 20
        while (tokens := self.scheduler.matched(request, Owner("", request.cache_salt or ""), local)) is None:
            assert time.monotonic() < until
            self.step()
        return tokens

    def serve(self, request: FakeRequest, table: Sequence[int]) -> int:
        """Load what can be loaded, compute the rest, save it; how many tokens were loaded."""
        tokens = self.matched(request)
        computed = tokens
        if tokens:
            self.scheduler.load(request, table, tokens)
            before = set(self.failed)
            if self.asynchronous:
                left = dict.fromkeys(range(len(self.workers)), True)
                until = time.monotonic() + 20
                waiting = set(left)
                while waiting:
                    assert time.monotonic() < until, "a load never ends"
                    waiting -= self._over(request.request_id)
            else:
                self.step()
            failed = self.failed - before
            bad = [index for index, block in enumerate(table[: tokens // BLOCK]) if block in failed]
            self.failed -= failed
            computed = bad[0] * BLOCK if bad else tokens
        assert self.right(request, table, computed)
        part = Scheduled(request.request_id, table, True, computed, request.num_tokens)
        self.step([part], lambda: self.compute(request, table, computed, request.num_tokens))
        self.settle()
        self.scheduler.end(request.request_id)
        return computed

    def _over(self, request: str) -> set[int]:
        orders = self.scheduler.orders(())
        over, report = set(), Report()
        for rank, worker in enumerate(self.workers):
            worker.fence(orders)
            worker.begin(orders)
            worker.load(wait=False)
            worker.save()
            if request in worker.finished():
                over.add(rank)
            self.failed |= worker.failed_blocks()
            said = worker.report()
            report = report if said is None else report.add(said)
        self.scheduler.report(report)
        return over

    def settle(self) -> None:
        """Steps without requests, until everything has been reported."""
        until = time.monotonic() + 20
        while self.scheduler.busy:
            assert time.monotonic() < until
            self.step()
        for engine in self.engines:
            assert engine.flush(20)
        self.step()


@pytest.fixture
def pretended(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(b"weights")
    with contextlib.ExitStack() as stack:

        def make(**settings: Any) -> Pretended:
            one = Pretended(tmp_path, **settings)
            stack.callback(one.close)
            return one

        yield make


def disk(tmp_path: Path) -> dict[str, Any]:
    return {"type": "disk", "path": str(tmp_path / "kv")}


MEMORY = {"type": "memory", "capacity": "64MiB"}
PROMPT = list(range(27))


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
def test_the_second_request_loads_what_the_first_computed(
    pretended: Any, tmp_path: Path, tiers: str, asynchronous: bool
) -> None:
    wanted = {"memory": [MEMORY], "disk": [disk(tmp_path)], "both": [MEMORY, disk(tmp_path)]}[tiers]
    one = pretended(tiers=wanted, asynchronous=asynchronous)
    assert one.serve(FakeRequest("a", PROMPT[:]), range(8)) == 0
    assert one.serve(FakeRequest("b", [*PROMPT[:20], 99, 98, 97, 96, 95]), range(8, 16)) == 16
    assert one.serve(FakeRequest("c", PROMPT[:]), range(16, 24)) == 24
    assert one.failed == set()


def test_another_process_finds_it_and_sees_where(pretended: Any, tmp_path: Path) -> None:
    one = pretended(tiers=[MEMORY, disk(tmp_path)])
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    two = pretended(tiers=[MEMORY, disk(tmp_path)])
    request = FakeRequest("b", PROMPT[:])
    assert two.matched(request, 4) == 20
    assert two.scheduler.sources["b"] == {"disk": 20}
    assert two.serve(request, range(8)) == 24
    again = FakeRequest("c", PROMPT[:])
    assert two.matched(again) == 24 and two.scheduler.sources["c"] == {"memory": 24}, "promoted, and known to be"


def test_what_the_engine_has_itself_is_not_touched(pretended: Any) -> None:
    one = pretended(tiers=[MEMORY])
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    request = FakeRequest("b", PROMPT[:])
    tokens = one.matched(request, 12)
    assert tokens == 12
    one.scheduler.load(request, range(8, 16), tokens)
    while not one.step():
        pass
    view = one.memory[0][1]
    assert not view[8:11].any() and not view[14:16].any()
    assert all(torch.equal(view[8 + block], one.page(request, block, 1, 0)) for block in range(3, 6))


def test_ranks_agree_on_what_is_there(pretended: Any, tmp_path: Path) -> None:
    one = pretended(tiers=[MEMORY, disk(tmp_path)], ranks=2)
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    assert one.matched(FakeRequest("b", PROMPT[:])) == 24
    one.engines[1].clear()
    one.step()
    assert one.matched(FakeRequest("c", PROMPT[:])) == 0, "the part of one rank is gone everywhere"
    assert one.serve(FakeRequest("d", PROMPT[:]), range(8, 16)) == 0
    assert one.serve(FakeRequest("e", PROMPT[:]), range(16, 24)) == 24


def test_part_of_a_rank_in_memory_and_part_on_disk_will_do(pretended: Any, tmp_path: Path) -> None:
    one = pretended(tiers=[MEMORY, disk(tmp_path)], ranks=2)
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    keys = [segment.key for segment in one.workers[1]._names.segments(one_chunks(one, PROMPT))]
    one.engines[1].tiers["memory"].remove(keys)
    one.step()
    request = FakeRequest("b", PROMPT[:])
    assert one.matched(request) == 24 and one.scheduler.sources["b"] == {"disk": 24}
    assert one.serve(request, range(8, 16)) == 24


def one_chunks(one: Pretended, tokens: list[int]) -> Any:
    one.scheduler.begin(FakeRequest("named", tokens[:]), NOBODY)
    return one.scheduler._planner.chunks("named")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_damage_is_computed_again_and_healed(pretended: Any, tmp_path: Path, asynchronous: bool) -> None:
    pretended(tiers=[disk(tmp_path)]).serve(FakeRequest("a", PROMPT[:]), range(8))
    blobs = sorted(path for path in (tmp_path / "kv").rglob("*1-*") if path.is_file())
    assert len(blobs) == 1, "the second chunk"
    data = bytearray(blobs[0].read_bytes())
    data[len(data) // 2] ^= 1
    blobs[0].write_bytes(bytes(data))
    two = pretended(tiers=[disk(tmp_path)], asynchronous=asynchronous)
    assert two.serve(FakeRequest("b", PROMPT[:]), range(8)) == 8, "up to the damage"
    assert two.scheduler.counts["failed"] == 1
    assert two.serve(FakeRequest("c", PROMPT[:]), range(8, 16)) == 24, "it was stored again"


def test_a_request_whose_load_failed_does_not_try_for_ever(
    pretended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = pretended(tiers=[disk(tmp_path)])
    monkeypatch.setattr(two.index, "locate", lambda segments: ["disk"] * len(segments))
    request = FakeRequest("b", PROMPT[:])
    tokens = two.matched(request)
    assert tokens == 24
    two.scheduler.load(request, range(8), tokens)
    while not two.step():
        pass
    assert two.failed == set(range(6))
    assert two.matched(request) == 0
    assert two.matched(FakeRequest("c", PROMPT[:])) == 24, "others may try"


def test_what_was_planned_before_a_failure_was_known_is_not_saved(pretended: Any, tmp_path: Path) -> None:
    """A step that computes with KV that did not come computes nonsense; its name must not get it."""
    pretended(tiers=[disk(tmp_path)]).serve(FakeRequest("a", PROMPT[:]), range(8))
    for path in (tmp_path / "kv").rglob("*-*"):
        if path.is_file():
            path.write_bytes(b"")
    two = pretended(tiers=[disk(tmp_path)], asynchronous=False)
    request = FakeRequest("b", [*PROMPT[:16], *range(50, 70)])
    two.scheduler.load(request, range(9), two.matched(request))
    nonsense = torch.full((two.elements,), float("nan"))

    def compute() -> None:
        for view in two.memory[0]:
            view[:9] = nonsense

    two.step([Scheduled("b", range(9), True, 16, 36)], compute)
    two.settle()
    assert two.failed, "the engine is told"
    three = pretended(tiers=[disk(tmp_path)])
    segments = three.workers[0]._names.segments(one_chunks(three, request.tokens))
    assert len(segments) == 4 and three.index.locate(segments) == [None] * 4


def test_a_block_that_is_given_away_is_read_first(pretended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = pretended(tiers=[MEMORY])
    began, go_on = threading.Event(), threading.Event()
    read = one.engines[0].connector.read

    def slow(*args: Any, **where: Any) -> None:
        began.set()
        assert go_on.wait(20)
        read(*args, **where)

    monkeypatch.setattr(one.engines[0].connector, "read", slow)
    first, second = FakeRequest("a", PROMPT[:]), FakeRequest("b", [7] * 27)
    one.scheduler.begin(first, NOBODY)
    one.step([Scheduled("a", range(8), True, 0, 27)], lambda: one.compute(first, range(8), 0, 27))
    assert began.wait(20)
    one.scheduler.end("a")
    one.scheduler.begin(second, NOBODY)
    threading.Timer(0.2, go_on.set).start()
    one.step([Scheduled("b", range(8), True, 0, 27)], lambda: one.compute(second, range(8), 0, 27))
    one.settle()
    assert one.serve(FakeRequest("c", PROMPT[:]), range(8, 16)) == 24, "and it is right"


def test_a_save_that_does_not_end_is_given_up(pretended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom_connector_vllm.worker.FENCE_SECONDS", 0.1)
    one = pretended(tiers=[MEMORY])
    hanging = threading.Event()
    keeper = one.engines[0]._stack.keeper
    reserve = keeper._reserve
    monkeypatch.setattr(keeper, "_reserve", lambda *args, **kw: (hanging.wait(20), reserve(*args, **kw))[1])
    first, second = FakeRequest("a", PROMPT[:]), FakeRequest("b", [7] * 27)
    one.scheduler.begin(first, NOBODY)
    one.step([Scheduled("a", range(8), True, 0, 27)], lambda: one.compute(first, range(8), 0, 27))
    one.scheduler.end("a")
    one.scheduler.begin(second, NOBODY)
    began = time.monotonic()
    one.step([Scheduled("b", range(8), True, 0, 27)], lambda: one.compute(second, range(8), 0, 27))
    assert time.monotonic() - began < 10
    hanging.set()
    one.settle()
    assert one.matched(FakeRequest("c", PROMPT[:])) == 0, "nothing else has its name"


def test_a_request_that_is_over_gets_no_kv(pretended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended(tiers=[disk(tmp_path)]).serve(FakeRequest("a", PROMPT[:]), range(8))
    two = pretended(tiers=[disk(tmp_path)])
    began, go_on = threading.Event(), threading.Event()
    fetch = two.engines[0]._stack.fetcher.fetch

    def late(*args: Any, **kw: Any) -> Any:
        began.set()
        assert go_on.wait(20)
        return fetch(*args, **kw)

    monkeypatch.setattr(two.engines[0]._stack.fetcher, "fetch", late)
    request = FakeRequest("b", PROMPT[:])
    two.scheduler.load(request, range(8), two.matched(request))
    two.step()
    assert began.wait(20)
    two.scheduler.end("b")
    assert two.step() == set()
    go_on.set()
    until = time.monotonic() + 20
    while "b" not in two.step():
        assert time.monotonic() < until, "the engine waits for the end of the load to free its blocks"
    assert all(not view.any() for view in two.memory[0]) and two.failed == set()


def test_salts_do_not_meet(pretended: Any, tmp_path: Path) -> None:
    one = pretended(tiers=[MEMORY, disk(tmp_path)])
    one.serve(FakeRequest("a", PROMPT[:], cache_salt="x"), range(8))
    assert one.serve(FakeRequest("b", PROMPT[:], cache_salt="y"), range(8)) == 0
    assert one.serve(FakeRequest("c", PROMPT[:], cache_salt="x"), range(8, 16)) == 24
    one.engines[0].clear("x")
    one.step()
    assert one.matched(FakeRequest("d", PROMPT[:], cache_salt="x")) == 0, "a tenant can be purged by its salt"
    assert one.matched(FakeRequest("e", PROMPT[:], cache_salt="y")) == 24


def test_after_a_reset_nothing_is_what_it_was(pretended: Any, tmp_path: Path) -> None:
    """Weights may have changed: not for those who share the tiers, whose KV stays."""
    one = pretended(tiers=[MEMORY, disk(tmp_path)], ranks=2)
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    running, loading = FakeRequest("running", [5] * 27), FakeRequest("loading", PROMPT[:])
    one.scheduler.begin(running, NOBODY)
    one.step([Scheduled("running", range(8, 16), True, 0, 10)], lambda: one.compute(running, range(8, 16), 0, 8))
    one.scheduler.load(loading, range(16, 24), one.matched(loading))
    one.scheduler.clear()
    assert one.matched(FakeRequest("b", PROMPT[:])) == 0, "before any worker heard of it"
    part = Scheduled("running", (), False, 10, 27)
    one.step([part], lambda: one.compute(running, range(8, 16), 8, 27))
    one.settle()
    assert len(one.engines[0].memory) == 0 or one.matched(FakeRequest("c", [5] * 27)) == 0
    assert one.matched(FakeRequest("d", PROMPT[:])) == 0 and one.matched(FakeRequest("e", [5] * 27)) == 0
    assert one.serve(FakeRequest("f", PROMPT[:]), range(8)) == 0
    assert one.serve(FakeRequest("g", PROMPT[:]), range(8, 16)) == 24, "what is computed since is kept"
    adapted = Owner("lora:1", "")
    one.scheduler.begin(FakeRequest("h", PROMPT[:]), adapted)
    other = pretended(tiers=[MEMORY, disk(tmp_path)], ranks=2)
    assert other.matched(FakeRequest("i", PROMPT[:])) == 24, "of before the reset, for who has these weights"


def test_all_who_read_a_block_are_fenced(pretended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests share blocks by the engine's own cache, and both save them; both saves wait."""
    monkeypatch.setattr("kvloom_connector_vllm.worker.FENCE_SECONDS", 0.2)
    one = pretended(tiers=[MEMORY])
    keeper = one.engines[0]._stack.keeper
    go_on, reserve = threading.Event(), keeper._reserve
    monkeypatch.setattr(keeper, "_reserve", lambda *args, **kw: (go_on.wait(20), reserve(*args, **kw))[1])
    first, second, third = (FakeRequest(name, [1] * 27 if name != "c" else [2] * 27) for name in "abc")
    for request in (first, second):
        one.scheduler.begin(request, NOBODY)
        computed = 0 if request is first else 24
        part = Scheduled(request.request_id, range(8), True, computed, 27)
        one.step([part], lambda request=request: one.compute(request, range(8), 0, 27))
    one.scheduler.end("a")
    one.scheduler.end("b")
    one.scheduler.begin(third, NOBODY)
    one.step([Scheduled("c", range(8), True, 0, 27)], lambda: one.compute(third, range(8), 0, 27))
    go_on.set()
    one.settle()
    tokens = one.matched(FakeRequest("d", [1] * 27))
    if tokens:
        request = FakeRequest("e", [1] * 27)
        one.scheduler.load(request, range(8, 16), one.matched(request))
        while not one.step():
            pass
        assert one.right(request, range(8, 16), tokens)
    assert one.serve(FakeRequest("f", [2] * 27), range(16, 24)) in (0, 24)


def test_whatever_a_save_raises_stays_here(pretended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = pretended(tiers=[MEMORY])

    def broken(*args: Any, **where: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(one.engines[0].connector, "read", broken)
    for name, tokens in (("a", PROMPT), ("b", [3] * 27)):
        request = FakeRequest(name, list(tokens))
        one.scheduler.begin(request, NOBODY)
        one.step([Scheduled(name, range(8), True, 0, 27)])
        one.scheduler.end(name)
    one.settle()
    assert one.matched(FakeRequest("c", PROMPT[:])) == 0


def test_a_step_waits_once_for_all_of_its_requests(
    pretended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloom_connector_vllm.scheduler.LOOKUP_SECONDS", 0.2)
    monkeypatch.setattr("kvloom_connector_vllm.scheduler.LATE_SECONDS", 1.0)
    one = pretended(tiers=[disk(tmp_path)])
    go_on = threading.Event()
    monkeypatch.setattr(one.index, "locate", lambda segments: go_on.wait(20) and [None] * len(segments))
    requests = [FakeRequest(f"r{number}", [number] * 27) for number in range(30)]
    for request in requests:
        one.scheduler.begin(request, NOBODY)
    began = time.monotonic()
    assert [one.scheduler.matched(request, NOBODY, 0) for request in requests] == [None] * 30
    assert time.monotonic() - began < 2.0, "0.2 seconds, and not 6"
    time.sleep(1.1)
    assert [one.scheduler.matched(request, NOBODY, 0) for request in requests] == [0] * 30, "and not for ever"
    monkeypatch.setattr("kvloom_connector_vllm.scheduler.STALE_SECONDS", 60.0)
    assert [one.scheduler.matched(request, NOBODY, 0) for request in requests[5:]] == [0] * 25, "nor is it an error"
    go_on.set()


def test_a_slow_tier_is_asked_while_others_compute(
    pretended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended(tiers=[disk(tmp_path)]).serve(FakeRequest("a", PROMPT[:]), range(8))
    two = pretended(tiers=[disk(tmp_path)])
    go_on = threading.Event()
    locate = two.index.locate
    monkeypatch.setattr(two.index, "locate", lambda segments: (go_on.wait(20), locate(segments))[1])
    request = FakeRequest("b", PROMPT[:])
    two.scheduler.begin(request, NOBODY)
    began = time.monotonic()
    assert two.scheduler.matched(request, NOBODY, 0) is None
    assert time.monotonic() - began < 5
    go_on.set()
    assert two.matched(request) == 24


def test_a_tier_that_cannot_be_asked_holds_nothing(
    pretended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pretended(tiers=[disk(tmp_path)])

    def broken(segments: Any) -> Any:
        raise OSError("no")

    monkeypatch.setattr(one.index, "locate", broken)
    assert one.matched(FakeRequest("a", PROMPT[:])) == 0


def test_an_idle_step_says_nothing(pretended: Any) -> None:
    one = pretended(tiers=[MEMORY])
    one.step()
    orders = one.scheduler.orders(())
    assert not orders.step and not orders.clear
    worker = one.workers[0]
    worker.begin(orders)
    worker.load(wait=False)
    worker.save()
    assert worker.report() is None and worker.finished() == set() and worker.failed_blocks() == set()


def test_generated_tokens_are_there_for_the_next_turn(pretended: Any) -> None:
    one = pretended(tiers=[MEMORY], save_decode_cache=True)
    request = FakeRequest("a", PROMPT[:13])
    one.scheduler.begin(request, NOBODY)
    one.step([Scheduled("a", range(4), True, 0, 13)], lambda: one.compute(request, range(8), 0, 13))
    for position in range(13, 24):
        request.append(200 + position)
        blocks = [position // BLOCK] if position >= 16 and position % BLOCK == 0 else []
        part = Scheduled("a", blocks, False, position, position + 1)
        one.step([part], lambda end=position + 1: one.compute(request, range(8), end - BLOCK, end))
    one.settle()
    one.scheduler.end("a")
    assert one.serve(FakeRequest("b", [*request.tokens, 1, 2, 3]), range(8, 16)) == 24


def test_routers_are_told_what_came_and_what_left(pretended: Any, tmp_path: Path) -> None:
    one = pretended(tiers=[MEMORY, disk(tmp_path)])
    request = FakeRequest("a", PROMPT[:])
    one.serve(request, range(8))
    told = one.scheduler.announcements()
    for medium in ("CPU", "STORAGE"):
        mine = [each.blocks for each in told if each.medium == medium]
        assert [blocks.hashes for blocks in mine] == [tuple(request.block_hashes[at : at + 2]) for at in (0, 2, 4)]
        assert [blocks.parent for blocks in mine] == [None, request.block_hashes[1], request.block_hashes[3]]
        assert [token for blocks in mine for token in blocks.tokens] == PROMPT[:24]
    keys = [segment.key for segment in one.workers[0]._names.segments(one_chunks(one, PROMPT))]
    one.engines[0].tiers["memory"].remove(keys[2:])
    one.step()
    (gone,) = one.scheduler.announcements()
    assert (gone.what, gone.medium, gone.blocks.hashes) == ("removed", "CPU", tuple(request.block_hashes[4:6]))
    one.scheduler.clear()
    assert [each.what for each in one.scheduler.announcements()] == ["cleared"]


def test_a_request_may_wait_for_what_another_engine_is_storing(pretended: Any, tmp_path: Path) -> None:
    one, two = pretended(tiers=[disk(tmp_path)]), pretended(tiers=[disk(tmp_path)])
    request = FakeRequest("b", PROMPT[:])
    assert two.scheduler.matched(request, NOBODY, 0, patience=20) is None
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    until = time.monotonic() + 20
    while (tokens := two.scheduler.matched(request, NOBODY, 0, patience=20)) is None:
        assert time.monotonic() < until
        two.step()
    assert tokens == 24
    other = FakeRequest("c", [1] * 27)
    while (tokens := two.scheduler.matched(other, NOBODY, 0, patience=0.1)) is None:
        assert time.monotonic() < until
    assert tokens == 0, "and not for ever"


def test_what_the_engines_own_cache_answers_stays_in_use(pretended: Any) -> None:
    """Nothing of it is loaded, so that the tiers would take it for unused, and evict it first."""
    chunk_bytes = LAYERS * 2 * 2 * BLOCK * 16 * 4
    one = pretended(tiers=[{"type": "memory", "capacity": 6 * max(chunk_bytes, 4096) + 4096}])
    for name, tokens in (("a", PROMPT), ("b", [7] * 27)):
        one.serve(FakeRequest(name, list(tokens)), range(8))
    request = FakeRequest("again", PROMPT[:])
    one.scheduler.begin(request, NOBODY)
    one.step([Scheduled("again", range(8), True, 24, 27)])
    one.settle()
    one.scheduler.end("again")
    one.serve(FakeRequest("c", [9] * 27), range(8, 16))
    assert one.matched(FakeRequest("d", PROMPT[:])) == 24
    assert one.matched(FakeRequest("e", [7] * 27)) < 24


def test_a_step_without_work_waits_a_little_for_what_is_under_way(
    pretended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that spins keeps the interpreter from the threads that it waits for."""
    monkeypatch.setattr("kvloom_connector_vllm.worker.IDLE_SECONDS", 20.0)
    one = pretended(tiers=[MEMORY])
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    request = FakeRequest("b", PROMPT[:])
    one.scheduler.load(request, range(8, 16), one.matched(request))
    orders, worker = one.scheduler.orders((), idle=True), one.workers[0]
    worker.fence(orders)
    worker.begin(orders)
    worker.load(wait=False)
    worker.save()
    assert worker.finished() == {"b"}, "one step was enough"
