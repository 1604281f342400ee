"""The blend components of one engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.config import BlendChoice
from kvloom.contracts.blend import BlendExecutor, BlendRetriever
from kvloom.types import KVSpec


@dataclass(frozen=True, slots=True)
class Blending:
    """What an engine blends with. Who runs the model (a runner) asks the retriever, then the executor."""

    executor: BlendExecutor
    retriever: BlendRetriever
    min_tokens: int
    """Shorter prompts are computed as they would be without blending."""

    @classmethod
    def make(cls, choice: BlendChoice, spec: KVSpec) -> Blending:
        executor: BlendExecutor = choice.executor.make(spec)
        try:
            return cls(executor, choice.retriever.make(spec), choice.min_tokens)
        except BaseException:
            executor.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        self.retriever.close()
        self.executor.close()
