"""The two halves when loads fail, saves hang and requests end early."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from halves_support import MEMORY, NOBODY, PROMPT, disk, one_chunks
from vllm_fakes import FakeRequest

from kvloom.tiers.stored.tier import StoredTier
from kvloom_connector_vllm.scheduling.messages import Report
from kvloom_connector_vllm.scheduling.plan import Scheduled
from kvloom_connector_vllm.transfers import MemoryChanges, Transfer


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
    two.scheduler.load(request, [range(8)], tokens)
    two.step_until_over()
    assert two.failed == set(range(6))
    assert two.matched(request) == 0
    assert two.matched(FakeRequest("c", PROMPT[:])) == 24, "others may try"


def test_nothing_is_saved_of_a_step_that_failed_nor_later(
    pretended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pretended(tiers=[MEMORY, disk(tmp_path)])
    others = [5] * 27
    assert one.serve(FakeRequest("a", others), range(8)) == 0
    with monkeypatch.context() as failing:
        failing.setattr(one.workers[0], "save", partial(one.workers[0].save, computed=False))
        one.serve(FakeRequest("b", PROMPT[:]), range(8, 16))
    one.serve(FakeRequest("c", [6] * 27), range(8))
    two = pretended(tiers=[disk(tmp_path)])
    for each in (one, two):
        assert each.matched(FakeRequest("d", others)) == 24
        assert each.matched(FakeRequest("e", PROMPT[:])) == each.matched(FakeRequest("f", [6] * 27)) == 0


def test_what_was_planned_before_a_failure_was_known_is_not_saved(pretended: Any, tmp_path: Path) -> None:
    """A step that computes with KV that did not come computes nonsense; its name must not get it."""
    pretended(tiers=[disk(tmp_path)]).serve(FakeRequest("a", PROMPT[:]), range(8))
    for path in (tmp_path / "kv").rglob("*-*"):
        if path.is_file():
            path.write_bytes(b"")
    two = pretended(tiers=[disk(tmp_path)], asynchronous=False)
    request = FakeRequest("b", [*PROMPT[:16], *range(50, 70)])
    two.scheduler.load(request, [range(9)], two.matched(request))
    nonsense = torch.full((two.elements,), float("nan"))

    def compute() -> None:
        for view in two.memory[0]:
            view[:9] = nonsense

    two.step([Scheduled("b", [range(9)], True, 16, 36)], compute)
    two.settle()
    assert two.failed, "the engine is told"
    three = pretended(tiers=[disk(tmp_path)])
    segments = three.workers[0]._parts[0][0].names.segments(one_chunks(three, request.tokens))
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
    one.step([Scheduled("a", [range(8)], True, 0, 27)], lambda: one.compute(first, range(8), 0, 27))
    one.scheduler.end("a")
    one.scheduler.begin(second, NOBODY)
    threading.Thread(target=lambda: (began.wait(20), time.sleep(0.2), go_on.set())).start()
    one.step([Scheduled("b", [range(8)], True, 0, 27)], lambda: one.compute(second, range(8), 0, 27))
    assert began.is_set()
    one.settle()
    assert one.serve(FakeRequest("c", PROMPT[:]), range(8, 16)) == 24, "and it is right"


@pytest.mark.parametrize("late", [False, True])
def test_blocks_may_be_written_to_before_the_worker_is_told_of_the_step(
    pretended: Any, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """As vLLM's V2 runner does. late: a save that takes too long is given up by then."""
    monkeypatch.setattr("kvloom_connector_vllm.worker.LATER_SECONDS", 20.0)
    one = pretended(tiers=[MEMORY], written_first=True, save_decode_cache=True)
    go_on, storer = threading.Event(), one.engines[0]._stack.storer
    reserve = storer._reserve
    if late:
        monkeypatch.setattr("kvloom_connector_vllm.worker.FENCE_SECONDS", 0.1)
        monkeypatch.setattr(storer, "_reserve", lambda *args, **kw: (go_on.wait(20), reserve(*args, **kw))[1])
    request, table = FakeRequest("a", PROMPT[:]), range(8)
    one.scheduler.begin(request, NOBODY)
    one.step([Scheduled("a", [table], True, 0, 27)], lambda: one.compute(request, table, 0, 27))
    request.append(*[5] * 4)
    one.step([Scheduled("a", (), False, 27, 30)], lambda: one.compute(request, table, 24, 30))
    one.scheduler.end("a", [list(table)])
    one.step()
    for view in one.memory[0]:
        view.zero_()
    go_on.set()
    one.settle()
    again = FakeRequest("c", [*PROMPT, *[5] * 4])
    assert one.serve(again, range(14, 22)) == (0 if late else 28), "and it is right"


def test_a_save_that_does_not_end_is_given_up(pretended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom_connector_vllm.worker.FENCE_SECONDS", 0.1)
    one = pretended(tiers=[MEMORY])
    hanging = threading.Event()
    storer = one.engines[0]._stack.storer
    reserve = storer._reserve
    monkeypatch.setattr(storer, "_reserve", lambda *args, **kw: (hanging.wait(20), reserve(*args, **kw))[1])
    first, second = FakeRequest("a", PROMPT[:]), FakeRequest("b", [7] * 27)
    one.scheduler.begin(first, NOBODY)
    one.step([Scheduled("a", [range(8)], True, 0, 27)], lambda: one.compute(first, range(8), 0, 27))
    one.scheduler.end("a")
    one.scheduler.begin(second, NOBODY)
    began = time.monotonic()
    one.step([Scheduled("b", [range(8)], True, 0, 27)], lambda: one.compute(second, range(8), 0, 27))
    assert time.monotonic() - began < 10
    hanging.set()
    one.settle()
    assert one.matched(FakeRequest("c", PROMPT[:])) == 0, "nothing else has its name"


def test_a_step_waits_for_copies_and_not_for_a_store_that_is_slow(
    pretended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory has room for the chunks of two requests, and for those of no other: they are given up, once."""
    go_on, store = threading.Event(), StoredTier._store
    monkeypatch.setattr(StoredTier, "_store", lambda *given: (go_on.wait(60), store(*given))[1])
    one = pretended(tiers=[{"type": "memory", "capacity": "12KiB"}, disk(tmp_path) | {"deadline": "600s"}])

    def step(name: str, tokens: list[int]) -> float:
        request = FakeRequest(name, tokens)
        one.scheduler.begin(request, NOBODY)
        began = time.monotonic()
        one.step([Scheduled(name, [range(8)], True, 0, 27)], lambda: one.compute(request, range(8), 0, 27))
        one.scheduler.end(name)
        return time.monotonic() - began

    monkeypatch.setattr("kvloom_connector_vllm.worker.FENCE_SECONDS", 60.0)
    step("a", PROMPT[:])
    assert step("b", [7] * 27) < 30, "its copies are made, its writes wait"
    step("c", [8] * 27)
    asked = []
    wait_for_copies = Transfer.wait_for_copies
    monkeypatch.setattr(
        Transfer, "wait_for_copies",
        lambda save, until, **how: (asked.append(save.move.request), wait_for_copies(save, until, **how))[1],
    )  # fmt: skip
    assert step("d", [9] * 27) < 30, "no room comes, and the step does not wait for it"
    assert "b" not in asked and "c" in asked, "who was given up is not waited for again"
    go_on.set()
    one.settle()
    assert one.serve(FakeRequest("e", PROMPT[:]), range(8, 16)) == 24, "and it is right"


def test_a_request_that_is_over_gets_no_kv(pretended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended(tiers=[disk(tmp_path)]).serve(FakeRequest("a", PROMPT[:]), range(8))
    two = pretended(tiers=[disk(tmp_path)])
    began, go_on = threading.Event(), threading.Event()
    fetch = two.engines[0]._stack.loader.fetch

    def late(*args: Any, **kw: Any) -> Any:
        began.set()
        assert go_on.wait(20)
        return fetch(*args, **kw)

    monkeypatch.setattr(two.engines[0]._stack.loader, "fetch", late)
    request = FakeRequest("b", PROMPT[:])
    two.scheduler.load(request, [range(8)], two.matched(request))
    two.step()
    assert began.wait(20)
    two.scheduler.end("b")
    assert two.step() == set()
    go_on.set()
    until = time.monotonic() + 20
    while "b" not in two.step():
        assert time.monotonic() < until, "the engine waits for the end of the load to free its blocks"
    assert all(not view.any() for view in two.memory[0]) and two.failed == set()


def test_a_save_that_has_not_begun_when_its_blocks_are_needed_never_does(
    pretended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloom_connector_vllm.worker.FENCE_SECONDS", 0.1)
    one = pretended(tiers=[MEMORY])
    go_on, saved, save = threading.Event(), [], one.engines[0].save
    monkeypatch.setattr(one.engines[0], "touch", lambda segments: go_on.wait(20))
    monkeypatch.setattr(one.engines[0], "save", lambda *args, **kw: (saved.append(args), save(*args, **kw))[1])
    first, second = FakeRequest("a", PROMPT[:]), FakeRequest("b", [7] * 27)
    one.workers[0]._later.submit(one.engines[0].touch, ())  # what the save queues behind
    one.scheduler.begin(first, NOBODY)
    one.step([Scheduled("a", [range(8)], True, 0, 27)], lambda: one.compute(first, range(8), 0, 27))
    one.scheduler.end("a")
    one.scheduler.begin(second, NOBODY)
    one.step([Scheduled("b", [range(8)], True, 0, 27)], lambda: one.compute(second, range(8), 0, 27))
    go_on.set()
    one.settle()
    assert len(saved) == 1
    assert one.matched(FakeRequest("c", PROMPT[:])) == 0 and one.matched(FakeRequest("d", [7] * 27)) == 24


@pytest.mark.parametrize("over", [False, True])
def test_a_load_that_is_cut_off_by_sleep_has_failed_unless_its_request_is_over(
    pretended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    pretended(tiers=[disk(tmp_path)]).serve(FakeRequest("a", PROMPT[:]), range(8))
    one, began, go_on = pretended(tiers=[disk(tmp_path)]), threading.Event(), threading.Event()
    fetch = one.engines[0]._stack.loader.fetch

    def late(*args: Any, **kw: Any) -> Any:
        began.set()
        assert go_on.wait(20)
        return fetch(*args, **kw)

    monkeypatch.setattr(one.engines[0]._stack.loader, "fetch", late)
    request = FakeRequest("b", PROMPT[:])
    one.scheduler.load(request, [range(8)], one.matched(request))
    one.step()
    assert began.wait(20)
    if over:
        one.scheduler.end("b")
        assert one.step() == set()
    one.workers[0].end_transfers()
    go_on.set()
    assert one.step_until_over() == {"b"}
    assert one.failed == (set() if over else set(range(6))) and not any(view.any() for view in one.memory[0])


def test_chunks_that_come_and_go_between_two_reports_are_where_they_were_last() -> None:
    chance, held, told = random.Random(0), set[int](), set[int]()
    engine = SimpleNamespace(changes=lambda: each)
    changes = MemoryChanges(engine)
    for _ in range(500):
        if whole := chance.random() < 0.1:
            held = set()
        came = set(chance.sample(range(20), 3)) - held
        left = set(chance.sample(range(20), 3)) & held if not whole else set()
        held = (held | came) - left
        each = SimpleNamespace(whole=whole, came=list(came), left=list(left))
        changes.collect()
        if chance.random() < 0.4:
            changes.move_to(report := Report(), 0)
            told = (set() if report.whole else told) | set(report.came.get(0, ()))
            told -= set(report.left.get(0, ()))
            assert told == held


def test_all_who_read_a_block_are_fenced(pretended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests share blocks by the engine's own cache, and both save them; both saves wait."""
    monkeypatch.setattr("kvloom_connector_vllm.worker.FENCE_SECONDS", 0.2)
    one = pretended(tiers=[MEMORY])
    storer = one.engines[0]._stack.storer
    go_on, reserve = threading.Event(), storer._reserve
    monkeypatch.setattr(storer, "_reserve", lambda *args, **kw: (go_on.wait(20), reserve(*args, **kw))[1])
    first, second, third = (FakeRequest(name, [1] * 27 if name != "c" else [2] * 27) for name in "abc")
    for request in (first, second):
        one.scheduler.begin(request, NOBODY)
        computed = 0 if request is first else 24
        part = Scheduled(request.request_id, [range(8)], True, computed, 27)
        one.step([part], lambda request=request: one.compute(request, range(8), 0, 27))
    one.scheduler.end("a")
    one.scheduler.end("b")
    one.scheduler.begin(third, NOBODY)
    one.step([Scheduled("c", [range(8)], True, 0, 27)], lambda: one.compute(third, range(8), 0, 27))
    go_on.set()
    one.settle()
    tokens = one.matched(FakeRequest("d", [1] * 27))
    if tokens:
        request = FakeRequest("e", [1] * 27)
        one.scheduler.load(request, [range(8, 16)], one.matched(request))
        one.step_until_over()
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
        one.step([Scheduled(name, [range(8)], True, 0, 27)])
        one.scheduler.end(name)
    one.settle()
    assert one.matched(FakeRequest("c", PROMPT[:])) == 0


def test_what_a_client_calls_its_request_cannot_forge_a_log(
    pretended: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, name = pretended(tiers=[MEMORY]), "a\nERROR \x1b[31m" + "x" * 10_000

    def broken(*args: Any, **where: Any) -> None:
        raise RuntimeError("out of memory")

    one.serve(FakeRequest("before", PROMPT[:]), range(8))
    for verb in ("save", "load"):
        monkeypatch.setattr(one.engines[0], verb, broken)
    loads, saves = FakeRequest(name, PROMPT[:]), FakeRequest(f"{name}2", [3] * 27)
    one.scheduler.load(loads, [range(8, 16)], one.matched(loads))
    one.scheduler.begin(saves, NOBODY)
    one.step([Scheduled(saves.request_id, [range(16, 24)], True, 0, 27)])
    one.settle()
    said = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert len(said) == 2 and all(len(text) < 500 and text.isprintable() for text in said)


def test_a_step_waits_once_for_all_of_its_requests(
    pretended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloom_connector_vllm.scheduling.scheduler.LOOKUP_SECONDS", 0.2)
    monkeypatch.setattr("kvloom_connector_vllm.scheduling.scheduler.LATE_SECONDS", 1.0)
    one = pretended(tiers=[disk(tmp_path)])
    go_on = threading.Event()
    monkeypatch.setattr(one.index, "locate", lambda segments: go_on.wait(20) and [None] * len(segments))
    requests = [FakeRequest(f"r{number}", [number] * 27) for number in range(30)]
    for request in requests:
        one.scheduler.begin(request, NOBODY)
    began = time.monotonic()
    assert [one.scheduler.matched(request, NOBODY, 0) for request in requests] == [None] * 30
    assert time.monotonic() - began < 5.0, "0.2 seconds, and not 6"
    time.sleep(1.1)
    assert [one.scheduler.matched(request, NOBODY, 0) for request in requests] == [0] * 30, "and not for ever"
    monkeypatch.setattr("kvloom_connector_vllm.scheduling.scheduler.STALE_SECONDS", 60.0)
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


def test_tiers_are_asked_once_of_a_request_unless_they_have_some_of_it(
    pretended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended(tiers=[disk(tmp_path)]).serve(FakeRequest("a", PROMPT[:14]), range(8))
    one, asked = pretended(tiers=[disk(tmp_path)]), []
    locate = one.index.locate
    monkeypatch.setattr(one.index, "locate", lambda segments: (asked.append(len(segments)), locate(segments))[1])
    assert one.matched(FakeRequest("b", [7] * 27)) == 0 and len(asked) == 1
    assert one.matched(FakeRequest("c", PROMPT[:])) == 12 and len(asked) == 3, "a chunk, and then a piece behind it"
