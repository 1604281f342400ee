"""Engines with the connector and without it, prompts and answers: the tools of the requirements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloom_testkit.engines.base import BaseBench, NotMetError, expect
from kvloom_testkit.engines.process import Engine, EngineError, Host
from kvloom_testkit.engines.prompts import tokens
from kvloom_testkit.engines.subject import Subject

HOST = "kvloom_testkit.engines.vllm.host"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
"""Scheduler and worker in one process, and one thread for each kernel."""
_BLOCKS = 160
_PROMPT_CHUNKS = 12
"""Longest prompt and its answer, in chunks."""
_SHOWN = 3

Prompt = list[int]


@dataclass
class Session:
    """An engine with the connector."""

    name: str
    engine: Engine
    store: Path
    limits: dict[str, Any]
    """Arguments of the engine other than the usual ones."""
    begun: dict[str, int]
    """The engine's state when it had started."""
    stored: list[Prompt] = field(default_factory=list)


class Bench(BaseBench):
    """Starts engines in turn: one with the connector at a time, and one without it to compare with."""

    def __init__(self, subject: Subject, *, short: bool = False, host: Host | None = None) -> None:
        super().__init__(HOST, ENVIRONMENT, seconds=subject.seconds, short=short, host=host)
        self.subject = subject
        self.block, self.chunk = subject.block, subject.chunk
        self.faults: dict[str, list[str]] = {}
        """Faults that were seen in the engine's steps, by kind."""
        self.loads = self.steps = 0
        self._session: Session | None = None
        self._beside: Session | None = None
        self._control: tuple[dict[str, Any], Engine] | None = None
        self._answers: dict[Any, Any] = {}

    # -- engines -------------------------------------------------------------------------------------------------------

    def session(
        self, name: str = "main", *, store: str = "main", policy: str = "recompute", fresh: bool = False, **llm: Any
    ) -> Session:
        """The session of this name, which goes on if it was the last one, or else a new one.

        store: the name of a directory. fresh: in a new interpreter, not in a fork. Raises EngineError.
        """
        if self._session is not None and self._session.name == name and self._session.engine.alive:
            return self._session
        self.end_session()
        self._session = self._started(name, store, policy, fresh, llm)
        return self._session

    def beside(self, name: str, *, store: str) -> Session:
        """Another engine with the connector, beside the last session, and ended with it. Raises EngineError."""
        assert self._session is not None and self._beside is None
        self._beside = self._started(name, store, "recompute", False, self._session.limits)
        return self._beside

    def end_session(self) -> None:
        """End the last session, and what is beside it, however they can be ended."""
        ending, self._session, self._beside = (self._beside, self._session), None, None
        for session in ending:
            if session is not None:
                self.collect(session)
                try:
                    session.engine.close()
                except EngineError:  # a requirement of its own is about that
                    session.engine.kill()

    def _started(self, name: str, store: str, policy: str, fresh: bool, llm: dict[str, Any]) -> Session:
        folder = self.store(store)
        folder.mkdir(exist_ok=True)
        engine = self.fork(fresh)
        begun = self._start(engine, llm, self.subject.transfer(folder, policy))
        return Session(name, engine, folder, llm, begun)

    def collect(self, session: Session) -> None:
        """Add the faults that were seen in a session to those of all."""
        if session.engine.alive:
            try:
                seen = session.engine.call("seen")
            except EngineError:
                return
            self.loads += seen["loads"]
            self.steps += seen["steps"]
            for kind, texts in seen["faults"].items():
                self.faults.setdefault(kind, []).extend(f"{text} (session {session.name})" for text in texts)

    def model(self, seed: int = 1, kind: str = "dense") -> str:
        """The directory of the tiny model of a kind with these weights."""
        folder = self.host.folder / f"{kind}-{seed}"
        if not folder.exists():
            self.host.order("model", folder=str(folder), seed=seed, kind=kind)
        return str(folder)

    def adapter(self, seed: int) -> str:
        """The directory of an adapter."""
        folder = self.host.folder / f"adapter-{seed}"
        if not folder.exists():
            self.host.order("adapter", folder=str(folder), seed=seed)
        return str(folder)

    def close(self) -> None:
        """End every process."""
        self._end_control()
        super().close()

    def _start(self, engine: Engine, llm: dict[str, Any], kv: dict[str, Any] | None) -> Any:
        about = self.subject
        return engine.start(llm=self._llm(llm), kv=kv, settle=about.settle, patience=about.patience)

    def _llm(self, more: dict[str, Any]) -> dict[str, Any]:
        longest = _PROMPT_CHUNKS * self.chunk
        return {
            "model": self.model(), "dtype": "float32", "enforce_eager": True, "max_model_len": longest,
            "max_num_seqs": 8, "max_num_batched_tokens": 2 * longest, "disable_log_stats": False, "seed": 0,
            "distributed_executor_backend": "uni", "skip_tokenizer_init": True, "async_scheduling": False,
            "block_size": self.block, "num_gpu_blocks_override": _BLOCKS * self.chunk // self.block,
            "kv_cache_memory_bytes": 64 << 20, **more,
        }  # fmt: skip

    def _end_control(self) -> None:
        if self._control is not None:
            self._control[1].kill()
            self._control = None

    # -- answers -------------------------------------------------------------------------------------------------------

    def ask(self, session: Session, requests: Sequence[dict[str, Any] | Prompt], *, together: bool = False) -> Any:
        """The answers to prompts, or to requests as the driver takes them."""
        whole = [one if isinstance(one, dict) else {"prompt": one} for one in requests]
        answers = session.engine.call("generate", requests=whole, together=together)
        session.stored += [one["prompt"] for one in whole if one["prompt"] not in session.stored]
        return answers

    def keep(self, session: Session, prompts: Sequence[Prompt]) -> None:
        """Have prompts computed, unless they were in this session, and wait until the connector has stored them.

        Then the engine's own cache is emptied.
        """
        if any(prompt not in session.stored for prompt in prompts):
            self.ask(session, prompts)
            session.engine.call("settle")
        self.forget(session)

    def forget(self, session: Session) -> None:
        """Empty the engine's own prefix cache."""
        expect(
            session.engine.call("forget", connector=self.subject.is_tier),
            "the engine's own prefix cache could not be emptied: without requests, the connector holds blocks",
        )

    def own(self, request: dict[str, Any] | Prompt, split: int = 0, *, after: Prompt | None = None, **llm: Any) -> Any:
        """The engine's answer without a connector, with so many tokens, whole blocks, from its own prefix cache.

        after: the prompt that they were computed with; default: they alone. It decides the last bits, which matter
        where numbers have few.
        """
        whole = request if isinstance(request, dict) else {"prompt": request}
        prompt = whole["prompt"]
        block = llm.get("block_size", self.block)
        split = min(split, len(prompt) - 1) // block * block
        first = prompt[:split] if after is None else after
        about = whole.get("lora", ""), whole.get("max_tokens", 8)
        key = (str(sorted(llm.items())), tuple(prompt), split, tuple(first), about)
        if key not in self._answers:
            engine = self.without(**llm)
            engine.call("forget")
            if split:
                engine.call("generate", requests=[{**whole, "prompt": first, "max_tokens": 1}])
            (self._answers[key],) = engine.call("generate", requests=[whole])
        return self._answers[key]

    def without(self, **llm: Any) -> Engine:
        """The engine without a connector."""
        if self._control is None or self._control[0] != llm or not self._control[1].alive:
            self._end_control()
            engine = self.fork()
            self._start(engine, llm, None)
            engine.call("watch", on=False)
            self._control = llm, engine
        return self._control[1]

    def compare(
        self, request: dict[str, Any] | Prompt, answer: Any, said: str = "", *, after: Prompt | None = None, **llm: Any
    ) -> None:
        """Raise NotMetError unless an answer is the engine's own at the same split."""
        prompt = request["prompt"] if isinstance(request, dict) else request
        own = self.own(request, answer["cached"], after=after, **llm)
        about = f"{said or 'a prompt'} of {self.length(prompt)} tokens, {answer['cached']} of them found"
        if answer["tokens"] != own["tokens"]:
            raise NotMetError(
                f"{about}: the answer is {_start(answer['tokens'], own['tokens'])}; "
                f"the engine's own prefix cache gives {_start(own['tokens'], answer['tokens'])}"
            )
        for at, (one, other) in enumerate(zip(answer["logprobs"], own["logprobs"], strict=True)):
            if not abs(one - other) <= self.subject.tolerance:  # also where it is no number
                text = f"{about}: logprob {at} is {one:.5f}; the engine's own prefix cache gives {other:.5f}"
                raise NotMetError(text)

    def length(self, prompt: Prompt) -> str:
        """The length of a prompt, in words that show where blocks end."""
        blocks, rest = divmod(len(prompt), self.block)
        return f"{blocks} x {self.block}{f' + {rest}' if rest else ''}"

    def stem(self, seed: int = 1) -> Prompt:
        """A prompt of five chunks and some tokens."""
        return tokens(seed, 5 * self.chunk + self.block // 2)


def _start(these: Sequence[int], others: Sequence[int]) -> str:
    """The first tokens up to some behind the first difference."""
    first = next((at for at, pair in enumerate(zip(these, others, strict=False)) if pair[0] != pair[1]), len(these))
    end = first + _SHOWN
    return f"{list(these[:end])}{' ...' if len(these) > end else ''}"
