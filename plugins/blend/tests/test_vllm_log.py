"""Logs of the half in vLLM's worker, where vLLM need not be."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

import pytest

from kvloom_blend.vllm.orders import Blend, Orders, Prompt
from kvloom_blend.vllm.worker import Worker


class Broken:
    """A twin without its tiers."""

    def stored(self, prompt: Prompt) -> int:
        raise RuntimeError("gone")

    def close(self) -> None:
        pass


def test_what_a_client_calls_its_request_cannot_forge_a_log(caplog: pytest.LogCaptureFixture) -> None:
    twin: Any = Broken()
    worker = Worker(twin, least_found=0.5)
    name = "a\nERROR \x1b[31m" + "x" * 10_000
    worker.begin(Orders(asked=[Prompt(name, [1], None, None)], blends=[Blend(f"b{name}", [1])]))
    wait([worker._jobs[name].answer])
    worker.report()
    worker.close()
    assert worker.finished() == {f"b{name}"}
    said = [record.getMessage() for record in caplog.records if "by itself" in record.getMessage()]
    assert len(said) == 3 and all(len(text) < 500 and text.isprintable() for text in said)
