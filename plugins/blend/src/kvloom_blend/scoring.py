"""Scores of an executor in the tasks of `kvloom eval`, and the file of verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvloom import ConfigError, KVLoomError, KVSpec, pip_install

from . import screen, verdicts


class Scoring:
    """An executor at some ratios. Raises KVLoomError where kvloom-eval is missing."""

    def __init__(self, executor: str, ratios: Sequence[float], items: int, file: Path) -> None:
        try:
            import kvloom_eval  # noqa: F401
        except ImportError as error:
            raise KVLoomError(f"--tasks needs kvloom-eval ({error}): {pip_install('kvloom-eval')}") from None
        self._names = [f"{executor}/{ratio:g}" for ratio in ratios]
        self._items = items
        self._file = file
        self._spec: KVSpec | None = None
        self.verdicts: dict[str, dict[str, Any]] = {}
        """By executor and ratio: `scores` by task, and the reasons why it `failed`."""

    def measure(self, model: Any, tokenizer: Any, spec: KVSpec) -> None:
        from kvloom_eval import judge_blending, steps

        with screen.progress("scoring", steps(self._items)) as step:
            self.verdicts = judge_blending(model, tokenizer, self._names, items=self._items, step=step)
        self._spec = spec

    def save(self, missed: Sequence[str]) -> list[str]:
        """Write the file, and return what failed in the tasks. Raises ConfigError.

        missed: limits that were missed beside tasks, for which every verdict fails.
        """
        assert self._spec is not None
        failed = [f"{name}: {reason}" for name, one in self.verdicts.items() for reason in one["failed"]]
        for one in self.verdicts.values():
            one["failed"] = [*missed, *one["failed"]]
        try:
            verdicts.save(self._file, self._spec, self.verdicts)
        except OSError as error:
            raise ConfigError("--out", f"{self._file} cannot be written ({error.strerror})") from None
        return failed

    def print(self) -> None:
        tasks = list(dict.fromkeys(task for one in self.verdicts.values() for task in one["scores"]))
        screen.print_table(
            "right answers, and those of a whole prefill", ("", *tasks, "verdict"),
            [
                (
                    name,
                    *(f"{one['scores'][task]['blended']:.0%} of {one['scores'][task]['exact']:.0%}" for task in tasks),
                    "failed" if one["failed"] else "passed",
                )
                for name, one in self.verdicts.items()
            ],
        )  # fmt: skip
        screen.console().print(f"verdicts: {self._file}", soft_wrap=True)
