"""Requirements of blocks, threads and files over many requests, of aborts and of preemption."""

from __future__ import annotations

from kvloom_testkit.engines.base import NotApplicableError, expect
from kvloom_testkit.engines.bench import Bench, Session
from kvloom_testkit.engines.prompts import tokens

_GROWTH = 4


class Lifetime:
    """Requirements on what is given back."""

    def test_E12_preempted_requests_are_right(self, bench: Bench) -> None:
        """With too little memory for all requests, each gets its right answer, and so do those that continue it.

        Why: a preempted request comes back with other blocks, and those that it had belong to somebody else.

        Usually: the list of a request's blocks extended where it was replaced, or copies of blocks that another request
        has by then.
        """
        blocks = 16 * bench.chunk // bench.block
        session = bench.session("tight", store="tight", num_gpu_blocks_override=blocks)
        session.engine.call("overwrite_given")
        prompts = [tokens(40, bench.chunk) + tokens(41 + one, bench.chunk + bench.block // 2) for one in range(6)]
        requests = [{"prompt": prompt, "max_tokens": 2 * bench.chunk} for prompt in prompts]
        for turn in ("first", "again"):
            answers = bench.ask(session, requests, together=True)
            for request, answer in zip(requests, answers, strict=True):
                bench.compare(request, answer, f"among six in memory for three, {turn}, a prompt")
            session.engine.call("settle")
        if not session.engine.call("state")["preemptions"]:
            raise NotApplicableError("the engine preempted nothing")
        bench.forget(session)
        for prompt, answer in zip(prompts, answers, strict=True):
            longer = prompt + answer["tokens"] + tokens(50, 5)
            (found,) = bench.ask(session, [longer])
            bench.compare(longer, found, "after preemption, a prompt")
        # These give their blocks back in the step that fills them, and the next step gives some to the next request.
        brief = [{"prompt": tokens(45 + one, 9 * bench.chunk + 3), "max_tokens": 1} for one in range(4)]
        bench.ask(session, brief, together=True)
        session.engine.call("settle")
        for request in brief:
            bench.forget(session)
            longer = request["prompt"] + tokens(51, 5)
            (found,) = bench.ask(session, [longer])
            bench.compare(longer, found, "that continues one whose blocks another one got at once, a prompt")
        _expect_nothing_held(session, "after preemption")

    def test_E13_aborted_requests_give_back(self, bench: Bench) -> None:
        """A request that is aborted while it waits, loads, is computed or is stored leaves nothing behind.

        Why: clients hang up all the time; blocks that do not come back are gone until the engine is started again.

        Usually: an id that `get_finished` never reports, since its request was forgotten when it ended.
        """
        session = bench.session()
        bench.keep(session, [bench.stem()])
        for steps in (0, 1, 2, 3, 5):
            bench.forget(session)
            requests = [{"prompt": one} for one in (bench.stem(), tokens(60 + steps, 3 * bench.chunk), bench.stem())]
            session.engine.call("abort", requests=requests, steps=steps)
            _expect_nothing_held(session, f"after requests were aborted, {steps} steps after they came")
        bench.forget(session)
        (answer,) = bench.ask(session, [bench.stem()])
        bench.compare(bench.stem(), answer, "after aborts, a prompt")

    def test_E14_blocks_come_back(self, bench: Bench) -> None:
        """After many requests, with hits and without, every block is free again.

        Why: an engine that loses a block in a hundred requests stops within a day.

        Usually: `request_finished` that returns true for a request whose id is never reported.
        """
        _many(bench)
        _expect_nothing_held(bench.session(), "after many requests")

    def test_E15_threads_and_files_do_not_grow(self, bench: Bench) -> None:
        """The process has no more threads and open files after many requests than after some.

        Why: both are limited, and what reaches the limit first is the engine's own socket.

        Usually: a thread or a file for each request, closed when it is collected.
        """
        _many(bench)
        session = bench.session()
        before = session.engine.call("state")
        _many_requests(bench, session, seed=5000)
        after = session.engine.call("state")
        for name in ("threads", "descriptors"):
            text = f"{before[name]} {name} after some requests, {after[name]} after {_count(bench)} more"
            expect(after[name] - before[name] <= _GROWTH, text)

    def test_E16_reset_leaves_nothing(self, bench: Bench) -> None:
        """After `reset_cache` returned true, nothing that was computed before is found, stores under way included.

        Why: it is called when weights change, and old KV is wrong from then on.

        Usually: an index that is cleared and a store that is not, or stores under way that arrive afterwards.
        """
        session = bench.session()
        if bench.subject.is_tier:
            raise NotApplicableError("vLLM resets what is in front of it only")
        if not session.engine.call("supports_reset"):
            raise NotApplicableError("it has no reset_cache")
        stored, underway = bench.stem(4), bench.stem(5)
        bench.ask(session, [stored])
        _wait_for_stores(session)
        bench.forget(session)
        (answer,) = bench.ask(session, [stored])
        if not answer["cached"]:
            raise NotApplicableError("nothing was found before the reset, so that it would show nothing")
        bench.ask(session, [{"prompt": underway, "max_tokens": 1}])
        if not session.engine.call("reset"):  # it may not be possible before the stores are done
            _wait_for_stores(session)
            if not session.engine.call("reset"):
                raise NotApplicableError("its reset_cache says that nothing was reset")
        _wait_for_stores(session)
        session.stored.clear()
        for prompt, when in ((stored, "before a reset"), (underway, "just before a reset")):
            (answer,) = bench.ask(session, [prompt])
            text = f"{answer['cached']} tokens that were computed {when} were found after it was said to be done"
            expect(not answer["cached"], text)
            bench.compare(prompt, answer, "after a reset, a prompt")


def _wait_for_stores(session: Session) -> None:
    """Wait twice as long as stores may take."""
    for _ in range(2):
        session.engine.call("settle")


def _expect_nothing_held(session: Session, when: str) -> None:
    session.engine.call("settle")
    state = session.engine.call("state")
    expect(not state["requests"], f"{when} the scheduler still knows {state['requests']} requests")
    held = session.begun["free"] - state["free"]
    expect(held <= 0, f"{when} {held} blocks are not free")


def _count(bench: Bench) -> int:
    return 50 if bench.short else 400


def _many(bench: Bench) -> None:
    bench.once("many", lambda: _many_requests(bench, bench.session(), seed=3000))


def _many_requests(bench: Bench, session: Session, *, seed: int) -> None:
    """Short requests, a third of which begin as a stored prompt, two at a time."""
    bench.keep(session, [bench.stem()])
    session.engine.call("watch", on=False)
    requests = []
    for number in range(_count(bench)):
        known = bench.stem()[: (1 + number % 3) * bench.chunk] if number % 3 == 0 else []
        requests.append({"prompt": known + tokens(seed + number, bench.chunk + number % 9), "max_tokens": 2})
    for at in range(0, len(requests), 10):
        if at % 20 == 0:
            bench.forget(session)
        session.engine.call("generate", requests=requests[at : at + 10], together=at % 20 == 0)
    session.engine.call("settle")
    session.engine.call("watch", on=True)
