"""Connectors that are legal, though not what anybody would expect: they meet every requirement."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvloom_testkit.mutants import Oddity
from kvloom_testkit.reference.vllm.connector import DirectoryConnector, Metadata, Transfer


class InTheBackground(Oddity, DirectoryConnector):
    """Loads run between steps, and take a while."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.asynchronous = True

    def load(self, load: Transfer) -> None:
        time.sleep(0.02)
        super().load(load)


class AnswersLater(Oddity, DirectoryConnector):
    """It needs several steps to say what it has."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.asked = getattr(self, "asked", 0) + 1
        if self.asked % 3:
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class Forgets(Oddity, DirectoryConnector):
    """One block in ten is not written."""

    def write(self, name: str, data: bytes) -> None:
        if random.random() < 0.9:
            super().write(name, data)


class StoresLater(Oddity, DirectoryConnector):
    """Copies are taken in the step, and written a little later by a thread of its own, which a reset waits for.

    `kv_connector_extra_config`, beside the reference's: `late`, by how many seconds.
    """

    writing: ClassVar[list[threading.Timer]] = []

    def write(self, name: str, data: bytes) -> None:
        late = self._kv_transfer_config.kv_connector_extra_config.get("late", 0.05)
        self.writing.append(threading.Timer(late, super().write, (name, data)))
        self.writing[-1].start()

    def reset_cache(self) -> bool | None:
        while self.writing:
            self.writing.pop().join()
        return super().reset_cache()


@dataclass
class _Orders(Metadata):
    """Orders, and the requests whose blocks are held from this step on."""

    ended: list[str] = field(default_factory=list)


class HoldsBlocks(Oddity, DirectoryConnector):
    """The blocks of a request that has ended are held for some steps, and then reported by every rank."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.ended: list[str] = []
        self.held: dict[str, int] = {}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished(request, block_ids)
        if block_ids:
            self.ended.append(request.request_id)
        return bool(block_ids), None

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        meta = super().build_connector_meta(scheduler_output)
        ended, self.ended = self.ended, []
        return _Orders(meta.loads, meta.saves, ended)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        _, loaded = super().get_finished(finished_req_ids)
        self.held.update(dict.fromkeys(self._orders.ended, 3))
        done = {name for name, steps in self.held.items() if not steps}
        self.held = {name: steps - 1 for name, steps in self.held.items() if steps}
        return done or None, loaded
