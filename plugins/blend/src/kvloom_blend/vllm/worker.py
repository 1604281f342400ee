"""The worker's half: looks prompts up, and blends one at a time, beside what vLLM computes. Knows no vLLM."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock

from kvloom import one_line

from .orders import Blend, Orders, Prompt, Report
from .twin import Pages, Twin

log = logging.getLogger("vllm.kvloom.blend")  # others are not printed

IDLE_SECONDS = 0.005
"""Time that a step without computation waits for work under way, so that vLLM does not spin."""


class NotBlended(Exception):
    """vLLM has to compute it."""


@dataclass
class _Job:
    prompt: Prompt
    answer: Future[bool]
    """True if enough is stored."""
    told: bool = False
    wanted: bool = True
    blocks: Sequence[int] = ()
    blending: Future[None] | None = None


class Worker:
    """All calls come from vLLM's worker thread. A step with nothing to do costs microseconds."""

    def __init__(self, twin: Twin, *, least_found: float) -> None:
        """least_found: a share of the prompt."""
        self.twin = twin
        self._least = least_found
        self._pages: Pages | None = None
        self._jobs: dict[str, _Job] = {}
        self._failed: set[int] = set()
        self._idle = False
        self._looking = ThreadPoolExecutor(1, "kvloom-blend-look")
        self._blending = ThreadPoolExecutor(1, "kvloom-blend")
        self._counting = Lock()
        self._counts: dict[str, list[float]] = {}

    def attach(self, pages: Pages) -> None:
        """vLLM's memory, once there is any."""
        self._pages = pages

    # -- a step, in order ----------------------------------------------------------------------------------------------

    def begin(self, orders: Orders) -> None:
        """Begin the ordered work."""
        self._idle = orders.idle
        for prompt in orders.asked:
            self._jobs[prompt.request] = _Job(prompt, self._looking.submit(self._enough, prompt))
        for request in orders.over:
            self._give_up(request)
        for blend in orders.blends:
            self._blend(blend)

    def finished(self) -> set[str]:
        """Requests whose blending is over since the last call, whether it came to anything or not."""
        under_way = [job.blending or job.answer for job in self._jobs.values()]
        under_way = [one for one in under_way if not one.done()]
        if self._idle and under_way:
            wait(under_way, timeout=IDLE_SECONDS, return_when="FIRST_COMPLETED")
        over = {name: job for name, job in self._jobs.items() if job.blending is not None and job.blending.done()}
        for request, job in over.items():
            del self._jobs[request]
            assert job.blending is not None
            error = job.blending.exception()
            if error is not None and job.wanted:
                level = logging.INFO if isinstance(error, NotBlended) else logging.WARNING
                log.log(level, "vLLM computes request %s by itself: %s", one_line(request), one_line(error))
                self._count("not_blended", tokens=len(job.prompt.tokens), reason=type(error).__name__)
                self._failed.update(job.blocks)
        return set(over)

    def failed_blocks(self) -> set[int]:
        """Blocks that were to be written and were not, since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def report(self) -> Report | None:
        """Answers that have come since the last call."""
        report = Report()
        for request, job in list(self._jobs.items()):
            if job.told or not job.answer.done():
                continue
            job.told = True
            error = job.answer.exception()
            if error is not None:
                log.warning(
                    "vLLM computes request %s by itself: it was not looked up: %s", one_line(request), one_line(error)
                )
            report.found[request] = error is None and job.answer.result()
            if not report.found[request]:
                del self._jobs[request]
        return report if report.found else None

    def counts(self) -> dict[str, list[float]]:
        """Counts since the last call: `event|tier|reason` to number, chunks, tokens, bytes, seconds."""
        with self._counting:
            counts, self._counts = self._counts, {}
        return counts

    def close(self) -> None:
        """Wait for work under way, and close the twin. Idempotent."""
        for pool in (self._looking, self._blending):
            pool.shutdown(wait=True, cancel_futures=True)
        self.twin.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _blend(self, blend: Blend) -> None:
        job = self._jobs.get(blend.request)
        if job is None:  # the scheduler's half asks first, so this would be a mistake of ours
            log.error("vLLM computes request %s by itself: nobody asked about it", one_line(blend.request))
            nothing: Future[bool] = Future()
            job = self._jobs[blend.request] = _Job(Prompt(blend.request, [], None, None), nothing, told=True)
        job.blocks = blend.blocks
        job.blending = self._blending.submit(self._fill, job)

    def _give_up(self, request: str) -> None:
        job = self._jobs.get(request)
        if job is None:
            return
        job.wanted = False
        if job.blending is None:
            job.answer.cancel()
            del self._jobs[request]

    def _enough(self, prompt: Prompt) -> bool:
        return self.twin.stored(prompt) >= self._least * len(prompt.tokens)

    def _fill(self, job: _Job) -> None:
        """Blend a prompt into its blocks, which belong to this thread until `finished` names it."""
        if not job.wanted:
            return
        prompt, began = job.prompt, time.monotonic()
        if not self._enough(prompt):
            raise NotBlended("its stored KV is gone")
        done = self.twin.blend(prompt)
        if not job.wanted:
            return
        if not done.exact_tokens + done.blended_tokens:
            raise NotBlended(done.note or "nothing was found")
        assert self._pages is not None
        self._pages.write(done.caches[0], job.blocks, len(prompt.tokens) - 1)
        seconds = time.monotonic() - began
        if done.exact_tokens:
            self._count("exact", tokens=done.exact_tokens)
        self._count("blended", tokens=done.blended_tokens, seconds=seconds)
        log.info(
            "request %s: of %d tokens, %d are an exact prefix, %d blended; %.0f %% of a prefill computed in %.2f s",
            one_line(prompt.request), len(prompt.tokens), done.exact_tokens, done.blended_tokens,
            100 * done.computed_share, seconds,
        )  # fmt: skip

    def _count(self, event: str, *, tokens: int, seconds: float = 0.0, reason: str = "") -> None:
        with self._counting:
            sums = self._counts.setdefault(f"{event}||{reason}", [0, 0, 0, 0, 0])
            sums[0] += 1
            sums[2] += tokens
            sums[4] += seconds
