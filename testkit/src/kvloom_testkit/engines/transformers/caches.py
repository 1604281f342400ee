"""Models of transformers with a cache around them: the tools of their requirements. Importable without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kvloom_testkit.engines.base import BaseBench, NotApplicableError, NotMetError, expect
from kvloom_testkit.engines.process import Engine, EngineError, Host, RaisedError, RefusedError
from kvloom_testkit.engines.subject import place, replaced

HOST = "kvloom_testkit.engines.transformers.host"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_REFUSALS = ("ValueError", "NotImplementedError", "ConfigError")

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Cached:
    """A function that wraps a model, or a class of caches."""

    name: str
    module: str
    wraps: bool
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments; `{tmp}` in a text is a directory of each store's own."""
    chunk: int = 32
    """Tokens of the smallest piece that is stored."""
    tolerance: float = 1e-3
    """Largest difference of two logprobs that count as equal."""
    seconds: float = 60.0
    """Deadline of each call."""

    @classmethod
    def wrapper(cls, text: str, **more: Any) -> Cached:
        """The subject of `MODULE:FUNCTION`, a context manager that is called with the model. Raises ConfigError."""
        module, name = place(text, "--cached")
        return cls(name, str(module), True, **more)

    @classmethod
    def cache(cls, text: str, **more: Any) -> Cached:
        """The subject of `MODULE:CLASS`, a cache that is called with the model's `config`. Raises ConfigError."""
        module, name = place(text, "--cache")
        return cls(name, str(module), False, **more)

    @property
    def has_store(self) -> bool:
        """Return whether its settings name the kit's directory."""
        return self.wraps and replaced(self.extra, "") != self.extra

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a report names."""
        return {"extra": self.extra, "chunk": self.chunk}

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


class CacheBench(BaseBench):
    """Loads one model after another with the cache, and without it to compare with."""

    def __init__(self, subject: Cached, *, short: bool = False, host: Host | None = None) -> None:
        super().__init__(HOST, ENVIRONMENT, seconds=subject.seconds, short=short, host=host)
        self.subject, self.chunk = subject, subject.chunk
        self._open: list[Engine] = []
        self._plain: tuple[dict[str, Any], Engine] | None = None
        self._answers: dict[Any, Any] = {}

    def open(self, store: str = "main", *, fresh: bool = False, **settings: Any) -> Engine:
        """A process with a model in the cache; others go on. fresh: of a new interpreter. Raises EngineError.

        settings: `model`, `kind` of it, and `dtype`.
        """
        folder = self.store(store)
        folder.mkdir(exist_ok=True)
        engine = self.fork(fresh)
        self._open.append(engine)
        about = self.subject
        self._start(engine, settings, about.module, replaced(about.extra, str(folder)))
        return engine

    def without(self, **settings: Any) -> Engine:
        """A process with the plain model."""
        if self._plain is None or self._plain[0] != settings or not self._plain[1].alive:
            self._end_plain()
            self._plain = settings, self.fork()
            self._start(self._plain[1], settings, None, {})
        return self._plain[1]

    def _start(self, engine: Engine, settings: dict[str, Any], module: str | None, extra: dict[str, Any]) -> None:
        model = self._model(settings.get("model", 1), settings.get("kind", "dense"))
        about = self.subject
        engine.start(
            model=model, dtype=settings.get("dtype", "float32"), name=about.name, module=module, extra=extra,
            wraps=about.wraps,
        )  # fmt: skip

    def _model(self, seed: int, kind: str) -> str:
        folder = self.host.folder / f"{kind}-{seed}"
        if not folder.exists():
            self.host.order("model", folder=str(folder), seed=seed, kind=kind)
        return str(folder)

    def end_session(self) -> None:
        """Leave every cache, or kill its process."""
        ending, self._open = self._open, []
        for engine in ending:
            try:
                engine.close()
            except EngineError:
                engine.kill()

    def close(self) -> None:
        """End every process."""
        self._end_plain()
        super().close()

    def _end_plain(self) -> None:
        if self._plain is not None:
            self._plain[1].kill()
            self._plain = None

    def ask(self, engine: Engine, rows: Sequence[Prompt], *, may_refuse: bool = False, **options: Any) -> Any:
        """The answers to a batch. Raises NotApplicableError where the cache refuses it, if it may."""
        try:
            answer = engine.call("generate", rows=list(rows), **options)
        except RaisedError as error:
            raise (refused(error) if may_refuse else error) from error
        expect(answer["untouched"], "the tensor of the prompt was written to")
        return answer

    def compare(self, rows: Sequence[Prompt], answer: Any, said: str, settings: Any = None, **options: Any) -> None:
        """Raise NotMetError unless answers are the plain model's at the same split."""
        split = answer["cached"]
        key = (repr(rows), split, repr(settings), repr(options))
        if key not in self._answers:
            self._answers[key] = self.without(**(settings or {})).call("own", rows=list(rows), split=split, **options)
        own = self._answers[key]
        about = f"{said} of {len(rows[0])} tokens, {split} of them found"
        if answer["tokens"] != own["tokens"]:
            raise NotMetError(f"{about}: the answer is {answer['tokens'][0]}; without it, {own['tokens'][0]}")
        pairs = zip(chain(*answer["logprobs"]), chain(*own["logprobs"]), strict=True)
        for one, other in pairs:
            if not abs(one - other) <= self.subject.tolerance:
                raise NotMetError(f"{about}: a logprob is {one:.5f}; without it, {other:.5f}")

    def stem(self, seed: int = 1) -> Prompt:
        """A prompt of five chunks and some tokens."""
        from kvloom_testkit.engines.prompts import tokens

        return tokens(seed, 5 * self.chunk + self.chunk // 2)


def refused(error: EngineError) -> EngineError | NotApplicableError:
    """What an error is: a refusal if it is of a kind that says so, or else what it was."""
    text = str(error).partition(": ")[2]
    text = text.removeprefix("start: ") if isinstance(error, RefusedError) else text
    return NotApplicableError(f"it refuses: {text}") if text.startswith(_REFUSALS) else error
