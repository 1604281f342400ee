"""The two halves together: what is found, loaded, saved and told."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from halves_support import LAYERS, MEMORY, NOBODY, PROMPT, disk, one_chunks
from vllm_fakes import BLOCK, FakeRequest

from kvloom_connector_vllm.scheduling.messages import Report
from kvloom_connector_vllm.scheduling.plan import Owner, Scheduled
from kvloom_connector_vllm.scheduling.scheduler import patience_of
from kvloom_connector_vllm.transfers import Transfer
from kvloom_connector_vllm.worker import IDLE_SECONDS


@pytest.mark.parametrize("how", [{}, {"asynchronous": False}, {"asynchronous": False, "by_layer": True}])
@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
def test_the_second_request_loads_what_the_first_computed(
    pretended: Any, tmp_path: Path, tiers: str, how: dict[str, bool]
) -> None:
    wanted = {"memory": [MEMORY], "disk": [disk(tmp_path)], "both": [MEMORY, disk(tmp_path)]}[tiers]
    one = pretended(tiers=wanted, **how)
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


@pytest.mark.parametrize(("ranks", "asynchronous"), [(1, True), (1, False), (2, True)])
@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
def test_the_tail_of_a_prompt_is_kept_and_found(
    pretended: Any, tmp_path: Path, tiers: str, ranks: int, asynchronous: bool
) -> None:
    wanted = {"memory": [MEMORY], "disk": [disk(tmp_path)], "both": [MEMORY, disk(tmp_path)]}[tiers]
    settings = {"tiers": wanted, "chunk_tokens": 4 * BLOCK, "ranks": ranks, "asynchronous": asynchronous}
    one = pretended(**settings)
    assert one.serve(FakeRequest("a", PROMPT[:]), range(8)) == 0
    assert one.serve(FakeRequest("b", PROMPT[:]), range(8, 16)) == 24
    longer = [*PROMPT[:24], *range(50, 63)]
    assert one.serve(FakeRequest("c", longer), range(10)) == 24, "behind another's tail"
    assert one.serve(FakeRequest("d", [*longer, 1, 2, 3, 4, 5]), range(10, 21)) == 36, "two whole chunks and a block"
    assert one.serve(FakeRequest("e", PROMPT[:22]), range(8)) == 16, "of a shorter one there are no pieces"
    assert one.serve(FakeRequest("f", PROMPT[:22]), range(8, 16)) == 20
    if tiers != "memory":
        two = pretended(**settings)
        request = FakeRequest("g", longer)
        assert two.matched(request, 16) == 20 and two.scheduler.sources["g"] == {"disk": 20}
        assert two.serve(FakeRequest("h", PROMPT[:]), range(8)) == 24
    assert not one.failed


def test_pieces_of_the_first_chunk_that_lacks_are_found(pretended: Any, tmp_path: Path) -> None:
    """Not only those of the last one; and what a rank lacks is lacking."""
    one = pretended(tiers=[MEMORY, disk(tmp_path)], chunk_tokens=4 * BLOCK, ranks=2)
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    two = pretended(tiers=[MEMORY, disk(tmp_path)], chunk_tokens=4 * BLOCK, ranks=2)
    longer = [*PROMPT, *range(100, 140)]
    assert two.matched(FakeRequest("b", longer)) == 24
    pieces = [key for key in one.engines[1].memory.chunks() if key.depth == 1]
    one.engines[1].tiers["disk"].remove(pieces)
    three = pretended(tiers=[disk(tmp_path)], chunk_tokens=4 * BLOCK, ranks=2)
    assert len(pieces) == 1 and three.matched(FakeRequest("c", longer)) == 16


def test_a_tail_that_is_damaged_is_computed(pretended: Any, tmp_path: Path) -> None:
    settings = {"tiers": [disk(tmp_path)], "chunk_tokens": 4 * BLOCK}
    pretended(**settings).serve(FakeRequest("a", PROMPT[:]), range(8))
    (piece,) = (tmp_path / "kv").rglob("1-*")
    data = bytearray(piece.read_bytes())
    data[-1] ^= 1
    piece.write_bytes(data)
    one = pretended(**settings)
    assert one.serve(FakeRequest("b", PROMPT[:]), range(8)) == 16
    assert one.serve(FakeRequest("c", PROMPT[:]), range(8, 16)) == 24, "and kept again"


def test_without_tails_only_whole_chunks_are_kept(pretended: Any) -> None:
    one = pretended(tiers=[MEMORY], chunk_tokens=4 * BLOCK, save_tails=False)
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    assert one.serve(FakeRequest("b", PROMPT[:]), range(8, 16)) == 16


def test_what_the_engine_has_itself_is_not_touched(pretended: Any) -> None:
    one = pretended(tiers=[MEMORY])
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    request = FakeRequest("b", PROMPT[:])
    tokens = one.matched(request, 12)
    assert tokens == 12
    one.scheduler.load(request, [range(8, 16)], tokens)
    one.step_until_over()
    view = one.memory[0][1]
    assert not view[8:11].any() and not view[14:16].any()
    assert all(torch.equal(view[8 + block], one.page(request, block, 1, 0)) for block in range(3, 6))


def test_ranks_agree_on_what_is_there(pretended: Any, tmp_path: Path) -> None:
    one = pretended(tiers=[MEMORY, disk(tmp_path)], ranks=2)
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    assert one.matched(FakeRequest("b", PROMPT[:])) == 24
    one.engines[1].clear()
    one.step_until(lambda: one.matched(FakeRequest("c", PROMPT[:])) == 0)  # the part of one rank is gone everywhere
    assert one.serve(FakeRequest("d", PROMPT[:]), range(8, 16)) == 0
    assert one.serve(FakeRequest("e", PROMPT[:]), range(16, 24)) == 24


def test_part_of_a_rank_in_memory_and_part_on_disk_will_do(pretended: Any, tmp_path: Path) -> None:
    one = pretended(tiers=[MEMORY, disk(tmp_path)], ranks=2)
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    keys = [segment.key for segment in one.workers[1]._parts[0][0].names.segments(one_chunks(one, PROMPT))]
    one.engines[1].tiers["memory"].remove(keys)
    request = FakeRequest("b", PROMPT[:])
    one.step_until(lambda: one.matched(request) == 24 and one.scheduler.sources["b"] == {"disk": 24})
    assert one.serve(request, range(8, 16)) == 24


def test_models_that_share_a_directory_each_store_their_own(pretended: Any, tmp_path: Path) -> None:
    """vLLM's hashes of a prompt are the same for every model and rank, and a tier finds a chunk by its digest."""
    tier = disk(tmp_path) | {"capacity": "1GiB"}
    for weights in (b"weights", b"others"):
        (tmp_path / "model/model.safetensors").write_bytes(weights)
        for ranks in (1, 2):
            one = pretended(tiers=[tier], ranks=ranks)
            assert one.serve(FakeRequest("a", PROMPT[:]), range(8)) == 0
            again = pretended(tiers=[tier], ranks=ranks)
            assert again.serve(FakeRequest("b", PROMPT[:]), range(8)) == 24
            assert again.scheduler.counts["failed"] == 0
    stored = [path for path in (tmp_path / "kv").rglob("[0-9]*-*") if path.is_file()]
    assert again.engines[0].health().tiers[0].blobs == len(stored) == 18, "its capacity is for all of them"


def test_salts_do_not_meet(pretended: Any, tmp_path: Path) -> None:
    one = pretended(tiers=[MEMORY, disk(tmp_path)])
    one.serve(FakeRequest("a", PROMPT[:], cache_salt="x"), range(8))
    assert one.serve(FakeRequest("b", PROMPT[:], cache_salt="y"), range(8)) == 0
    assert one.serve(FakeRequest("c", PROMPT[:], cache_salt="x"), range(8, 16)) == 24
    one.engines[0].clear("x")  # a tenant can be purged by its salt
    one.step_until(lambda: one.matched(FakeRequest("d", PROMPT[:], cache_salt="x")) == 0)
    assert one.matched(FakeRequest("e", PROMPT[:], cache_salt="y")) == 24


def test_after_a_reset_nothing_is_what_it_was(pretended: Any, tmp_path: Path) -> None:
    """Weights may have changed: not for those who share the tiers, whose KV stays."""
    one = pretended(tiers=[MEMORY, disk(tmp_path)], ranks=2)
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    running, loading = FakeRequest("running", [5] * 27), FakeRequest("loading", PROMPT[:])
    one.scheduler.begin(running, NOBODY)
    one.step([Scheduled("running", [range(8, 16)], True, 0, 10)], lambda: one.compute(running, range(8, 16), 0, 8))
    one.scheduler.load(loading, [range(16, 24)], one.matched(loading))
    one.scheduler.clear()
    assert one.matched(FakeRequest("b", PROMPT[:])) == 0, "before any worker heard of it"
    part = Scheduled("running", (), False, 10, 27)
    one.step([part], lambda: one.compute(running, range(8, 16), 8, 27))
    one.settle()
    assert len(one.engines[0].memory) == 0 or one.matched(FakeRequest("c", [5] * 27)) == 0
    assert one.matched(FakeRequest("d", PROMPT[:])) == 0 and one.matched(FakeRequest("e", [5] * 27)) == 0
    assert one.serve(FakeRequest("f", PROMPT[:]), range(8)) == 0
    assert one.serve(FakeRequest("g", PROMPT[:]), range(8, 16)) == 24, "what is computed since is kept"
    adapted = Owner("lora:1")
    one.scheduler.begin(FakeRequest("h", PROMPT[:]), adapted)
    other = pretended(tiers=[MEMORY, disk(tmp_path)], ranks=2)
    assert other.matched(FakeRequest("i", PROMPT[:])) == 24, "of before the reset, for who has these weights"


def test_an_idle_step_says_nothing(pretended: Any) -> None:
    one = pretended(tiers=[MEMORY])
    worker = one.workers[0]
    worker._collect()  # the first report says what memory holds at the start
    one.step()
    orders = one.scheduler.orders(())
    assert not orders.step and not orders.clear
    worker.begin(orders)
    worker.load(wait=False)
    worker.save()
    assert worker.report() is None and worker.finished() == set() and worker.failed_blocks() == set()


def test_generated_tokens_are_there_for_the_next_turn(pretended: Any) -> None:
    one = pretended(tiers=[MEMORY], save_decode_cache=True)
    request = FakeRequest("a", PROMPT[:13])
    one.scheduler.begin(request, NOBODY)
    one.step([Scheduled("a", [range(4)], True, 0, 13)], lambda: one.compute(request, range(8), 0, 13))
    for position in range(13, 24):
        request.append(200 + position)
        blocks = [position // BLOCK] if position >= 16 and position % BLOCK == 0 else []
        part = Scheduled("a", [blocks], False, position, position + 1)
        one.step([part], lambda end=position + 1: one.compute(request, range(8), end - BLOCK, end))
    one.settle()
    one.scheduler.end("a", [range(6)])
    assert one.serve(FakeRequest("b", [*request.tokens, 1, 2, 3]), range(8, 16)) == 24


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_generated_tokens_are_there_for_the_next_turn(pretended: Any, ranks: int, tmp_path: Path) -> None:
    """Their blocks are given away in the step that follows the one in which they are saved."""
    one = pretended(tiers=[disk(tmp_path)], ranks=ranks, save_decode_cache=True, chunk_tokens=8 * BLOCK)
    request, other = FakeRequest("a", PROMPT[:13]), FakeRequest("b", [9] * 17)
    one.scheduler.begin(request, NOBODY)
    one.scheduler.begin(other, NOBODY)
    one.step([Scheduled("a", [range(8)], True, 0, 13)], lambda: one.compute(request, range(8), 0, 12))
    request.append(*range(100, 112))
    one.step([Scheduled("a", (), False, 13, 24)], lambda: one.compute(request, range(8), 12, 24))
    one.settle()
    one.scheduler.end("a", [range(6)])
    assert one.scheduler.busy, "the engine has to make a step"
    one.step()
    one.step([Scheduled("b", [range(5)], True, 0, 17)], lambda: one.compute(other, range(5), 0, 17))
    one.settle()
    assert one.serve(FakeRequest("c", [*request.tokens, 1, 2, 3]), range(8, 16)) == 24


def test_every_rank_has_read_the_blocks_of_a_request_that_is_over_before_they_are_written(pretended: Any) -> None:
    one = pretended(tiers=[MEMORY], ranks=2, save_decode_cache=True)
    request = FakeRequest("a", PROMPT[:7])
    one.scheduler.begin(request, NOBODY)
    one.step([Scheduled("a", [range(4)], True, 0, 8)], lambda: one.compute(request, range(4), 0, 8))
    one.settle()
    request.append(50, 51)
    one.scheduler.end("a", [range(3)])
    (save,) = one.scheduler.orders(()).step.ended
    other = FakeRequest("b", [9] * 17)
    one.scheduler.begin(other, NOBODY)
    one.scheduler.report(Report(saved=Counter({save.number: 1})))
    assert one.scheduler.busy
    assert one.scheduler.orders([Scheduled("b", [range(5)], True, 0, 17)]).step.fence == (save.number,)


def test_routers_are_told_of_what_is_saved_when_a_request_is_over(pretended: Any) -> None:
    one = pretended(tiers=[MEMORY], save_decode_cache=True)
    request = FakeRequest("a", PROMPT[:7])
    one.scheduler.begin(request, NOBODY)
    one.step([Scheduled("a", [range(4)], True, 0, 8)], lambda: one.compute(request, range(4), 0, 8))
    request.append(50, 51)
    one.scheduler.end("a", [range(3)])
    one.settle()
    (told,) = one.scheduler.announcements()
    assert (told.what, told.blocks.hashes) == ("stored", tuple(request.block_hashes[:2]))


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
    keys = [segment.key for segment in one.workers[0]._parts[0][0].names.segments(one_chunks(one, PROMPT))]
    one.engines[0].tiers["memory"].remove(keys[2:])
    told: list[Any] = []
    one.step_until(lambda: bool(told.extend(one.scheduler.announcements()) or told))
    (gone,) = told
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


@pytest.mark.parametrize(("params", "seconds"), [
    (None, 0), ({}, 0), ({"kvloom_wait_seconds": 2}, 2), ({"kvloom_wait_seconds": 10**400}, 60),
    *(({"kvloom_wait_seconds": wait}, 0) for wait in (None, True, "9", [9], -(10**400), float("nan"))),
    ({"kvloom_wait_seconds": float("inf")}, 60), ([], 0), ("kvloom_wait_seconds", 0),
])  # fmt: skip
def test_patience_is_what_a_client_writes_as_far_as_it_can_be_understood(params: Any, seconds: float) -> None:
    assert patience_of(params) == seconds


def test_an_engine_whose_requests_all_wait_does_not_spin(
    pretended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, slept = pretended(tiers=[disk(tmp_path)]), []
    worker, request = one.workers[0], FakeRequest("a", PROMPT[:])
    clock = SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
    monkeypatch.setattr("kvloom_connector_vllm.worker.time", clock)
    monkeypatch.setattr("kvloom_connector_vllm.scheduling.scheduler.time", SimpleNamespace(monotonic=lambda: 100.0))

    def step(*, idle: bool) -> None:
        worker.begin(one.scheduler.orders((), idle=idle))
        worker.load(wait=False)
        worker.save()
        assert not worker.finished()

    assert one.scheduler.matched(request, NOBODY, 0, patience=20) is None
    step(idle=False)
    assert not slept, "others compute"
    one.scheduler._lookups["a"].asked.result(20)
    assert one.scheduler.matched(request, NOBODY, 0, patience=20) is None
    step(idle=True)
    assert slept == [IDLE_SECONDS]
    step(idle=True)
    assert slept == [IDLE_SECONDS], "nobody waits"


def test_the_longer_a_request_waits_the_less_often_tiers_are_asked(
    pretended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a hundred long prompts that wait, each question costs time in every step of the engine."""
    one, now, request = pretended(tiers=[disk(tmp_path)]), [100.0], FakeRequest("a", PROMPT[:])
    monkeypatch.setattr("kvloom_connector_vllm.scheduling.scheduler.time", SimpleNamespace(monotonic=lambda: now[0]))
    while one.scheduler.matched(request, NOBODY, 0, patience=8) is None:
        one.scheduler._lookups["a"].asked.result(20)
        one.scheduler.orders((), idle=True)
        now[0] += 0.01
    assert now[0] == pytest.approx(108, abs=0.1) and 10 < one.scheduler.counts["lookups"] < 60


def test_what_the_engines_own_cache_answers_stays_in_use(pretended: Any) -> None:
    """Nothing of it is loaded, so that the tiers would take it for unused, and evict it first."""
    chunk_bytes = LAYERS * 2 * 2 * BLOCK * 16 * 4
    one = pretended(tiers=[{"type": "memory", "capacity": 6 * max(chunk_bytes, 4096) + 4096}])
    for name, tokens in (("a", PROMPT), ("b", [7] * 27)):
        one.serve(FakeRequest(name, list(tokens)), range(8))
    request = FakeRequest("again", PROMPT[:])
    one.scheduler.begin(request, NOBODY)
    one.step([Scheduled("again", [range(8)], True, 24, 27)])
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
    one.scheduler.load(request, [range(8, 16)], one.matched(request))
    orders, worker = one.scheduler.orders((), idle=True), one.workers[0]
    worker.fence(orders)
    worker.begin(orders)
    worker.load(wait=False)
    worker.save()
    assert worker.finished() == {"b"}, "one step was enough"


def test_a_step_without_work_waits_for_all_loads_of_a_request(pretended: Any) -> None:
    """A request with several groups has a load for each; each step that finds some under way would be one more."""

    class Ends(Event):
        def wait(self, timeout: float | None = None) -> bool:
            self.set()
            return True

    one = pretended(tiers=[MEMORY])
    one.serve(FakeRequest("a", PROMPT[:]), range(8))
    request, worker = FakeRequest("b", PROMPT[:]), one.workers[0]
    one.scheduler.load(request, [range(8, 16)], one.matched(request))
    worker.begin(one.scheduler.orders((), idle=True))
    worker.load(wait=False)
    worker.save()
    (load,) = worker._loads["b"]
    assert load.over.wait(20)
    loads = [Transfer(load.move, load.part) for _ in range(3)]
    for load in loads:
        load.over = Ends()
    worker._loads["b"] = loads
    assert worker.finished() == {"b"}
