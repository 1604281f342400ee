"""The two halves without vLLM: who is asked about, who is blended, and what is reported of it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvloom_blend.vllm import scheduler as scheduling
from kvloom_blend.vllm.orders import Orders, Prompt, Report
from kvloom_blend.vllm.scheduler import Scheduler, boundaries_of
from kvloom_blend.vllm.worker import Worker


def prompt(request: str = "a", count: int = 100) -> Prompt:
    return Prompt(request, list(range(count)), None, None)


class Twin:
    """Says that `share` of each prompt is stored, and blends it as `how` says."""

    def __init__(self, share: float = 1.0, how: Any = None) -> None:
        self.share, self.how, self.blended = share, how, []

    def stored(self, prompt: Prompt) -> float:
        return self.share * len(prompt.tokens)

    def blend(self, prompt: Prompt) -> Any:
        if self.how is not None:
            self.how()
        self.blended.append(prompt.request)
        count = len(prompt.tokens)
        return SimpleNamespace(caches=["cache"], exact_tokens=0, blended_tokens=count, computed_share=0.1, note="")

    def close(self) -> None:
        pass


class Pages:
    def __init__(self) -> None:
        self.written: list[tuple[list[int], int]] = []

    def write(self, cache: Any, blocks: list[int], num_tokens: int) -> None:
        self.written.append((list(blocks), num_tokens))


class Step:
    """vLLM's steps, with both halves."""

    def __init__(self, twin: Twin) -> None:
        self.scheduler, self.worker, self.pages = Scheduler(), Worker(twin, least_found=0.5), Pages()  # type: ignore[arg-type]
        self.worker.attach(self.pages)  # type: ignore[arg-type]
        self.finished: set[str] = set()
        self.failed: set[int] = set()

    def __call__(self) -> None:
        self.worker.begin(self.scheduler.orders(idle=True))
        self.finished |= self.worker.finished()
        self.failed |= self.worker.failed_blocks()
        report = self.worker.report()
        if report is not None:
            self.scheduler.report(report)

    def until(self, done: Any) -> None:
        until = time.monotonic() + 30
        while not done():
            assert time.monotonic() < until, "never"
            self()

    def matched(self, of: Prompt) -> int:
        answers: list[int | None] = []

        def known() -> bool:
            answers.append(self.scheduler.matched(of))
            return answers[-1] is not None

        self.until(known)
        assert answers[-1] is not None
        return answers[-1]


def test_all_but_the_last_token_goes_into_the_blocks() -> None:
    step = Step(Twin())
    assert step.scheduler.matched(prompt()) is None, "nobody knows yet"
    assert step.matched(prompt()) == 99 == step.matched(prompt()), "however often it is asked"
    step.scheduler.load("a", [7, 3])
    step.until(lambda: step.finished)
    assert step.finished == {"a"} and not step.failed
    assert step.pages.written == [([7, 3], 99)]
    assert step.matched(prompt()) == 0, "nothing is blended twice, such as after a preemption"
    counts = step.worker.counts()
    assert counts["blended||"][:3] == [1, 0, 100] and step.worker.counts() == {}


@pytest.mark.parametrize(("share", "tokens"), [(0.49, 0), (0.5, 99)])
def test_prompts_of_which_little_is_stored_are_the_engines_own(share: float, tokens: int) -> None:
    step = Step(Twin(share))
    assert step.matched(prompt()) == tokens
    step.scheduler.load("a", [1])
    assert len(step.scheduler.orders(idle=False).blends) == bool(tokens)


def test_what_fails_is_reported_block_by_block() -> None:
    def fail() -> None:
        raise RuntimeError("planted")

    step = Step(Twin(how=fail))
    assert step.matched(prompt()) == 99
    step.scheduler.load("a", [4, 5])
    step.until(lambda: step.finished)
    assert step.failed == {4, 5} and not step.pages.written
    assert step.worker.failed_blocks() == set(), "once"
    assert step.worker.counts() == {"not_blended||RuntimeError": [1, 0, 100, 0, 0]}


def test_what_is_gone_by_then_is_not_computed_by_the_twin() -> None:
    twin = Twin()
    step = Step(twin)
    assert step.matched(prompt()) == 99
    twin.share = 0.1
    step.scheduler.load("a", [4])
    step.until(lambda: step.finished)
    assert step.failed == {4} and not twin.blended


def test_blocks_of_an_aborted_request_are_kept_until_nobody_writes_to_them() -> None:
    twin = Twin(how=lambda: time.sleep(0.2))
    step = Step(twin)
    for request, block in (("a", 1), ("b", 2)):
        assert step.matched(prompt(request)) == 99
        step.scheduler.load(request, [block])
    step()
    step.scheduler.end("a")
    step.scheduler.end("b")
    step()
    assert not step.finished, "the first is being computed"
    step.until(lambda: len(step.finished) == 2)
    assert not step.pages.written and not step.failed
    assert twin.blended == ["a"], "the second was not begun"


def test_what_fails_once_nobody_wants_it_any_more_is_no_failure() -> None:
    def fail_late() -> None:
        time.sleep(0.2)
        raise RuntimeError("planted")

    step = Step(Twin(how=fail_late))
    assert step.matched(prompt()) == 99
    step.scheduler.load("a", [4])
    step()
    step.scheduler.end("a")
    step.until(lambda: step.finished)
    assert step.failed == set() and step.worker.counts() == {}


def test_requests_that_end_before_they_were_given_blocks_leave_nothing_behind() -> None:
    step = Step(Twin())
    assert step.matched(prompt()) == 99
    step.scheduler.end("a")
    step()
    assert not step.worker._jobs and not step.scheduler._states
    assert step.scheduler.orders(idle=False) == Orders()


def test_nobody_waits_long_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "ANSWER_SECONDS", 0.0)
    scheduler = Scheduler()
    assert scheduler.matched(prompt()) is None
    assert scheduler.matched(prompt()) == 0
    scheduler.report(Report({"a": True}))
    assert scheduler.matched(prompt()) == 0, "it came too late"
    assert scheduler.orders(idle=False).over == ["a"]


def test_after_a_reset_nothing_is_blended() -> None:
    scheduler = Scheduler()
    scheduler.stop()
    assert scheduler.matched(prompt()) == 0 and scheduler.orders(idle=True) == Orders(idle=True)


class Endless(list[int]):
    """A client's list that is longer than any prompt. Nobody looks at what is in it."""

    def __len__(self) -> int:
        return 1 << 40

    def __iter__(self) -> Any:
        raise AssertionError("the scheduler would look at each, in each step")


@pytest.mark.parametrize("given", [None, "1", [1.0], [-1], [101], [True], Endless()])
def test_boundaries_that_are_none(given: object) -> None:
    assert boundaries_of({"kvloom_boundaries": given}, 100) is None
    assert boundaries_of([given], 100) is None


def test_boundaries_in_order() -> None:
    assert boundaries_of({"kvloom_boundaries": [100, 7, 0]}, 100) == [0, 7, 100]
