"""The invariants: the core's promises, checked from the outside after each operation and at the end."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kvloom import Engine
from simulation.content import CHUNK_TOKENS, UNTOUCHED, Prompt
from simulation.fibers import Fiber, Process, Scheduler, Violation

_STEP_SECONDS = 1e-4
SLACK_SECONDS = 0.05
"""Time that computing may add to a deadline."""
_EXPECTED_REASONS = ("SimFault", "deadline", "BackendError", "CorruptBlobError", "UnreadableBlobError")


OPERATOR_SECONDS = 60.0
"""Time that a store may take to delete for an operator, whatever the deadline."""

_AT_ONCE = ("prefetch", "load", "save", "unpin", "health", "cancel", "counters", "layer.store", "layer.close")
_ONE_DEADLINE = (
    "retrieve", "store", "lookup", "find", "tier.get", "tier.batched_get", "tier.contains",
    "retrieve_layer", "store_layer", "layer.wait", "layer.finish",
)  # fmt: skip
_TASKS = ("result", "pin")
"""They wait for a task, which may have to wait for other tasks: one deadline at most without news of any of them."""


@dataclass(frozen=True)
class Allowance:
    """Time that a call may take on one engine, in virtual seconds: the only place that defines it.

    A verb of an engine returns one deadline, the longest of its tiers, after something arrived for it at the latest.
    Those for which more is inherent:

    - `remove` and `clear` ask each tier in turn, because no tier may be left out: first that tier's writes are waited
      for (one deadline), then its deletes are queued (behind a listing, say), and then made: twice 60 seconds at most;
    - `flush` without a timeout waits for a queue of writes, each of which has a deadline;
    - `close` gives each step of each tier a deadline: what is under way, what is queued, the backend, its threads;
    - a blocking `Tier.put` waits for room and then for the write: two deadlines.
    """

    deadline: float
    """The longest of all tiers."""
    tiers: int
    """Number of stored tiers."""
    prompt_seconds: float | None
    """Nothing is ever slow, full or wrong here, so nobody ever waits for a deadline: at most this."""
    queued: int = 0
    """Maximum number of writes that wait in one tier."""

    def seconds(self, verb: str, timeout: float | None) -> float:
        if timeout is not None:
            return timeout + SLACK_SECONDS
        if self.prompt_seconds is not None:
            return self.prompt_seconds
        return self._deadlines(verb) * self.deadline + self._operator(verb) + SLACK_SECONDS

    def _deadlines(self, verb: str) -> int:
        if verb in _AT_ONCE:
            return 0
        if verb in _ONE_DEADLINE or verb in _TASKS:
            return 1
        if verb == "tier.put":
            return 2
        if verb in ("remove", "clear"):
            return 1 + self.tiers
        if verb == "flush":
            return self.tiers * (2 + self.queued)
        assert verb == "close", verb
        return 2 + 8 * self.tiers

    def _operator(self, verb: str) -> float:
        return 2 * self.tiers * max(OPERATOR_SECONDS, self.deadline) if verb in ("remove", "clear") else 0.0


@dataclass(eq=False)
class Op:
    """A verb under way."""

    fiber: Fiber
    verb: str
    about: str
    began: float
    until: float
    seconds: float
    """Maximum time without news; no event makes a timeout longer."""
    timeout: float | None
    news: float
    """Time of the last news."""
    longest: float = 0.0
    """Longest time without news."""


@dataclass
class Longest:
    """The verb of a kind that took the most deadlines."""

    deadlines: float = 0.0
    text: str = ""


@dataclass(eq=False)
class Oracle:
    scheduler: Scheduler
    trace: Callable[[str], None] | None = None
    strict_removal: bool = True
    """A removed chunk must not come back: not asked for where another engine may bring it."""
    done: int = 0
    """Operations."""
    verbs: dict[str, int] = field(default_factory=dict)
    served_chunks: int = 0
    memory_was_damaged: bool = False
    """A chunk may have been found wrong after it was copied."""
    longest: dict[str, Longest] = field(default_factory=dict)
    _open: dict[Fiber, Op] = field(default_factory=dict)
    _digest: Any = field(default_factory=hashlib.blake2b)
    _storing: dict[Fiber, list[str]] = field(default_factory=dict)
    _stored_until: dict[str, float] = field(default_factory=dict)
    _known: dict[str, set[str]] = field(default_factory=dict)
    _saves: list[tuple[Process, Any, list[str]]] = field(default_factory=list)
    _fresh: dict[str, float] = field(default_factory=dict)
    """Time at which a client last stored a key, at the latest."""
    gone: dict[str, float] = field(default_factory=dict)
    """Keys that were removed, and when; what is stored again is no longer here."""

    def __post_init__(self) -> None:
        self.scheduler.on_alarm = self._alarm

    def violated(self, kind: str, text: str) -> None:
        """Stop the run. Does not return."""
        self.scheduler.stop(Violation(kind, text))

    @property
    def digest(self) -> str:
        """Equal for two runs that were the same, whatever process they ran in."""
        digest = self._digest.copy()
        digest.update(f"{self.scheduler.digest} {self.scheduler.steps} {self.scheduler.time!r}".encode())
        return str(digest.hexdigest()[:16])

    # -- operations ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def operation(self, verb: str, about: str, allowance: Allowance, *, timeout: float | None = None) -> Iterator[Op]:
        """A verb that is called now, and must be over in time."""
        scheduler = self.scheduler
        began = scheduler.time
        seconds = allowance.seconds(verb, timeout)
        op = Op(scheduler.current, verb, about, began, began + seconds, seconds, timeout, began)
        self._open[op.fiber] = op
        scheduler.alarm_at = min(scheduler.alarm_at, op.until)
        try:
            yield op
        finally:
            self._open.pop(op.fiber, None)
        self.done += 1
        self.verbs[verb] = self.verbs.get(verb, 0) + 1
        now = scheduler.time
        if now > op.until:
            self._late(op)
        took = max(op.longest, now - op.news) / allowance.deadline
        if timeout is None and took > self.longest.setdefault(verb, Longest()).deadlines:
            self.longest[verb] = Longest(took, f"{about} tiers={allowance.tiers}")

    def arrived(self) -> None:
        """Something arrived for whoever runs now, who may go on for longer."""
        mine = self._open.get(self.scheduler.current)
        if mine is not None:
            self._news(mine)
        else:
            self.ended()

    def ended(self) -> None:
        """A task ended, or got further: those that wait for one may go on for longer."""
        fiber = self.scheduler.current
        if fiber not in self._open:
            for op in self._open.values():
                if op.verb in _TASKS and op.fiber.process is fiber.process:
                    self._news(op)

    def _news(self, op: Op) -> None:
        now = self.scheduler.time
        op.longest = max(op.longest, now - op.news)
        op.news = now
        if op.timeout is None and now <= op.until:
            op.until = now + op.seconds

    def tell(self, op: Op, outcome: str) -> None:
        """Record the outcome, in the digest and the trace."""
        now = self.scheduler.time
        line = f"{op.began:.6f}-{now:.6f} {op.fiber.process.name}/{op.fiber.name} {op.verb} {op.about}: {outcome}"
        self._digest.update(line.encode())
        if self.trace is not None:
            self.trace(line)

    def forget(self, process: Process) -> None:
        """A crash: its verbs never return, and what they were storing may arrive or not."""
        for fiber in [fiber for fiber in self._open if fiber.process is process]:
            del self._open[fiber]
        now = self.scheduler.time
        for fiber in [fiber for fiber in self._storing if fiber.process is process]:
            self._fresh.update((key, now) for key in self._storing.pop(fiber))
        for _, _, keys in [save for save in self._saves if save[0] is process]:
            self._fresh.update((key, now) for key in keys)
        self._saves = [save for save in self._saves if save[0] is not process]

    def _alarm(self) -> None:
        now = self.scheduler.time
        for op in self._open.values():
            if op.until <= now:
                self.scheduler.violation = self._lateness(op)
                return
        self.scheduler.alarm_at = min((op.until for op in self._open.values()), default=float("inf"))

    def _late(self, op: Op) -> None:
        self.scheduler.stop(self._lateness(op))

    def _lateness(self, op: Op) -> Violation:
        text = f"{op.verb} {op.about} began at {op.began:.6f} and was to return by {op.until:.6f}\n{op.fiber.stack()}"
        return Violation("past deadline", text)

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def check_kv(
        self, prompt: Prompt, got: torch.Tensor, mask: torch.Tensor, *, model: int, salt: str, lossy: bool
    ) -> None:
        """got: int16 like `prompt.kv`. What the mask selects is that KV; nothing else was touched."""
        exact = prompt.kv(model, salt)
        want = torch.where(mask.view(1, 1, -1, 1), exact, UNTOUCHED)
        self.served_chunks += -(-int(mask.count_nonzero()) // CHUNK_TOKENS)
        if torch.equal(got, want):
            return
        if not self.memory_was_damaged and not torch.equal(got[:, :, ~mask], want[:, :, ~mask]):
            self.violated("wrong bytes", f"KV outside of the mask was touched (salt {salt!r}, prompt {prompt.list})")
        other = prompt.kv(model, salt, lossy=True)
        right = (got == exact).all(dim=3).all(dim=1).all(dim=0)
        if lossy:  # each token of one fidelity
            right |= (got == other).all(dim=3).all(dim=1).all(dim=0)
        wrong = (mask & ~right).nonzero().flatten().tolist()
        if wrong:
            words = got[:, :, wrong[0]].flatten()[:8].tolist()
            self.violated("wrong bytes", f"tokens {wrong} of {prompt.list} (salt {salt!r}) hold {words}")

    # -- removal -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def storing(self, keys: list[str], space: str) -> Iterator[None]:
        """While this lasts, the keys are stored again, and may be served."""
        self.stored(keys, space)
        fiber = self.scheduler.current
        self._storing[fiber] = keys
        try:
            yield
        finally:
            self._storing.pop(fiber, None)
            now = self.scheduler.time
            for key in keys:
                self._stored_until[key] = self._fresh[key] = now

    def stored(self, keys: Iterable[str], space: str) -> None:
        known = self._known.setdefault(space, set())
        for key in keys:
            known.add(key)
            self.gone.pop(key, None)

    def saving(self, task: Any, keys: list[str], space: str) -> None:
        """The keys are being stored until `task` is done."""
        self.stored(keys, space)
        self._saves.append((self.scheduler.current.process, task, keys))

    def expect_damage(self) -> None:
        """Memory of a store has changed: what is not served may have been touched all the same."""
        self.memory_was_damaged = True

    def excuse(self, key: str) -> None:
        """Something else than the core may bring it back."""
        self.gone.pop(key, None)
        self._stored_until[key] = float("inf")

    def known(self, spaces: Iterable[str]) -> list[str]:
        return sorted(key for space in spaces for key in self._known.get(space, ()))

    @contextlib.contextmanager
    def removing(self, keys: list[str]) -> Iterator[list[bool]]:
        """Append True to the list once it is said that they are gone."""
        began = self.scheduler.time
        busy = self._busy()
        success: list[bool] = []
        yield success
        if success and self.strict_removal:
            now = self.scheduler.time
            busy |= self._busy()
            for key in keys:
                if key not in busy and self._stored_until.get(key, -1.0) <= began:
                    self.gone[key] = now

    def _busy(self) -> set[str]:
        """The keys that are being stored now, by a verb or a task."""
        now = self.scheduler.time
        for _, task, keys in self._saves:
            if task.done:
                self._fresh.update((key, now) for key in keys)
        self._saves = [save for save in self._saves if not save[1].done]
        return {key for keys in (*self._storing.values(), *(save[2] for save in self._saves)) for key in keys}

    def check_age(self, served: Iterable[str], began: float, ttl: float | None) -> None:
        """began: of the verb that served them. ttl: what every tier that may have served them has at least."""
        if ttl is None:
            return
        busy = self._busy()
        for key in served:
            fresh = self._fresh.get(key, 0.0)
            if key not in busy and fresh + ttl < began - _STEP_SECONDS:
                self.violated("served expired", f"{key} was stored at {fresh:.6f}, and served after {began:.6f}")

    def gone_now(self, keys: Iterable[str]) -> dict[str, float]:
        return {key: self.gone[key] for key in keys if key in self.gone}

    def check_not_gone(self, before: dict[str, float], served: Iterable[str]) -> None:
        """before: what `gone_now` said when the retrieve began."""
        for key in served:
            if key in before and self.gone.get(key) == before[key]:
                self.violated("served after removal", f"{key} was removed at {before[key]:.6f} and is served again")

    # -- counters ------------------------------------------------------------------------------------------------------

    def check_counters(self, engine: Engine) -> None:
        """Nothing but what the stores did on purpose went wrong."""
        for key in engine.counters():
            reason = key.reason.rpartition(": ")[2]
            odd = key.name in ("tier_error", "observer_error") and not reason.startswith(_EXPECTED_REASONS)
            failed = key.name == "dropped" and "failed: " in key.reason and not reason.startswith(_EXPECTED_REASONS)
            if odd or failed:
                self.violated("unexpected error", f"{key.name} in tier {key.tier!r}: {key.reason}")


class LeakWatch(logging.Handler):
    """Turns the warnings of the core that nothing but a mistake causes into violations."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(logging.WARNING)
        self._oracle = oracle

    def emit(self, record: logging.LogRecord) -> None:
        if "never released" in str(record.msg):
            self._oracle.violated("leaked lease", record.getMessage())
