"""The blend components of one engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvloom.config import BlendChoice
from kvloom.contracts.blend import BlendExecutor, BlendRetriever
from kvloom.contracts.observer import Event
from kvloom.runtime import close_all
from kvloom.types import KVSpec


@dataclass(slots=True)
class Blending:
    """The components an engine blends with. The runner of the model calls the retriever, then the executor."""

    executor: BlendExecutor
    retriever: BlendRetriever
    min_tokens: int
    """Shorter prompts are computed as they would be without blending."""
    emit: Callable[[Event], None] = field(default=lambda event: None, repr=False)
    """The engine's events."""

    @classmethod
    def make(cls, choice: BlendChoice, spec: KVSpec) -> Blending:
        executor: BlendExecutor = choice.executor.make(spec)
        try:
            return cls(executor, choice.retriever.make(spec), choice.min_tokens)
        except BaseException:
            executor.close()
            raise

    def done(self, *, reused_tokens: int, computed_tokens: int, seconds: float) -> None:
        """Report a pass that blended; the runner calls this. Counts tokens whose KV was reused, and was computed."""
        self.emit(Event("blended", tokens=reused_tokens, seconds=seconds, reason="reused"))
        self.emit(Event("blended", tokens=computed_tokens, reason="computed"))

    def close(self) -> None:
        """Idempotent."""
        close_all(self.retriever.close, self.executor.close)
