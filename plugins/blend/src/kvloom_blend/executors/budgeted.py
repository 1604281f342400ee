"""The common part of executors with a budget."""

from __future__ import annotations

from kvloom import BlendExecutor, KVSpec

from .. import verdicts
from ..settings import RatioConfig


class BudgetedExecutor(BlendExecutor):
    """An executor that a verdict can let onto a model. Raises ConfigError if its `verdict` does not."""

    Config = RatioConfig

    def __init__(self, config: RatioConfig, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        if config.verdict is not None and spec is not None:
            verdicts.check(config.verdict, spec, verdicts.name_of(self.type, config))
