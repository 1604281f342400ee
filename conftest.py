"""What tests have counted is printed behind the results, also where several processes run them."""

from __future__ import annotations

import os
from collections import Counter

import pytest

# Tensors in tests are small: a second thread of torch's adds two thirds of the processor time, which it spends waiting.
os.environ.setdefault("OMP_NUM_THREADS", "1")


class _Counts:
    """A plugin of the process that prints: tests leave them in `user_properties`, as
    `("counted", (what, number))` or `("said", line)`."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._said: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for name, value in report.user_properties:
                if name == "counted":
                    what, number = value
                    self._counts[what] += number
                elif name == "said":
                    self._said.append(str(value))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._counts or self._said:
            terminalreporter.section("what was counted")
        for what, number in self._counts.items():
            terminalreporter.write_line(f"{number:>10,}  {what}")
        for line in self._said:
            terminalreporter.write_line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Requirements that a class of the kit's names in `slow` are: a variant's, which start a process each."""
    for item in items:
        for requirement in getattr(getattr(item, "cls", None), "slow", ()):
            if item.name.startswith(f"test_{requirement}_"):
                item.add_marker("slow")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Counts())
