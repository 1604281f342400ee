"""Writes to blocks, promises and claims are seen in the step in which they are made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvloom_testkit.engines.vllm.watch import POISON, Watch

BLOCK, BLOCKS = 4, 8


class Request(SimpleNamespace):
    request_id = "kit1-abc"
    num_tokens = 13
    num_computed_tokens = 0


class Scheduler:
    """As much of vLLM's scheduler as the watch looks at; one request, whose blocks are 3, 1 and 5."""

    def __init__(self) -> None:
        self.block_size = BLOCK
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
        pool = SimpleNamespace(blocks=[SimpleNamespace(ref_cnt=int(number in (3, 1, 5))) for number in range(BLOCKS)])
        self.kv_cache_manager = SimpleNamespace(block_pool=pool, get_block_ids=lambda name: ([3, 1, 5],))
        self.request = Request()
        self.requests = {self.request.request_id: self.request}
        self.claim: tuple[int | None, bool] = (8, False)
        self.connector = SimpleNamespace(
            get_num_new_matched_tokens=lambda request, computed: self.claim,
            update_state_after_alloc=lambda request, blocks, count: None,
        )

    def schedule(self) -> Any:
        return SimpleNamespace(num_scheduled_tokens={self.request.request_id: self.scheduled} if self.scheduled else {})

    def update_from_output(self, output: Any, result: Any) -> str:
        return "updated"

    scheduled = 5


class Steps:
    """A watch, the memory that it looks at, and steps."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.scheduler = Scheduler()
        self.caches = [torch.zeros(BLOCKS, 2, BLOCK, 3).to(dtype) for _ in range(2)]
        self.watch = Watch(self.scheduler, self.caches)
        self.scheduler.scheduled = 0
        self.step()

    def promise(self, local: int = 0) -> None:
        connector, request = self.scheduler.connector, self.scheduler.request
        count, _ = connector.get_num_new_matched_tokens(request, local)
        if count:
            blocks = SimpleNamespace(get_block_ids=lambda: ([3, 1, 5],))
            connector.update_state_after_alloc(request, blocks, count)

    def step(self, writes: dict[int, float] | None = None, layers: int = 2, **told: Any) -> None:
        self.scheduler.schedule()
        for block, value in (writes or {}).items():
            for cache in self.caches[:layers]:
                cache[block] = value
        output = SimpleNamespace(kv_connector_output=SimpleNamespace(**told))
        assert self.scheduler.update_from_output(None, output) == "updated"

    def faults(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = self.watch.take()["faults"]
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_writes_to_other_blocks_are_foreign(dtype: torch.dtype) -> None:
    steps = Steps(dtype)
    steps.step({2: 1.0, 5: float("nan")})
    free, held = steps.faults()["foreign"]
    assert free == "block 2, which is free, was written to"
    assert held == "block 5, which another request holds, was written to"
    steps.step()
    assert not steps.faults(), "each write is seen once, and what is not a number is equal to itself"
    steps.step({5: 2.0}, layers=1)
    assert len(steps.faults()["foreign"]) == 1


def test_blocks_that_are_computed_may_change() -> None:
    steps = Steps()
    steps.scheduler.scheduled, steps.scheduler.request.num_computed_tokens = 5, 10  # from the sixth token on
    steps.step({1: 1.0, 5: 1.0, 0: 1.0})
    assert not steps.faults()
    steps.step({3: 1.0})
    assert list(steps.faults()) == ["foreign"]


def test_loads_may_change_what_was_promised_and_must() -> None:
    steps = Steps()
    steps.promise()
    assert (steps.caches[0][3] == POISON).all() and (steps.caches[1][1] == POISON).all()
    assert (steps.caches[0][5] == 0).all()
    steps.step({3: 1.0, 1: 1.0})
    assert not steps.faults()
    steps.promise()
    steps.step({3: 1.0})
    assert list(steps.faults()) == ["unfilled"]
    steps.promise()
    steps.step({3: 1.0, 1: 1.0}, layers=1)
    assert len(steps.faults()["unfilled"]) == 2
    steps.promise()
    steps.step({3: 1.0}, invalid_block_ids={1})
    assert not steps.faults(), "that it failed was said"


def test_a_load_behind_local_blocks_fills_those_behind() -> None:
    steps = Steps()
    steps.promise(local=4)
    assert (steps.caches[0][1] == POISON).all() and (steps.caches[0][3] == 0).all()
    steps.step({1: 1.0, 5: 1.0})
    assert not steps.faults()


def test_a_load_in_the_background_is_judged_when_it_is_reported() -> None:
    steps = Steps()
    steps.scheduler.claim = (8, True)
    steps.promise()
    steps.step({3: 1.0})
    assert not steps.faults()
    steps.step({1: 1.0}, finished_recving={Request.request_id})
    assert not steps.faults()
    steps.step({1: 2.0})
    assert list(steps.faults()) == ["foreign"], "after it was reported"
    steps.promise()
    steps.step({3: 1.0}, finished_recving={Request.request_id})
    assert list(steps.faults()) == ["unfilled"]


@pytest.mark.parametrize(("claim", "local", "fits"), [
    ((12, False), 0, True), ((13, False), 0, False), ((13, True), 0, True), ((14, True), 0, False),
    ((-4, False), 0, False), ((8, False), 4, True), ((9, False), 4, False), ((0, False), 12, True),
    ((0, True), 0, False), ((None, False), 0, True),
])  # fmt: skip
def test_claims(claim: tuple[int | None, bool], local: int, fits: bool) -> None:
    steps = Steps()
    steps.scheduler.claim = claim
    steps.scheduler.connector.get_num_new_matched_tokens(steps.scheduler.request, local)
    assert ("claims" not in steps.faults()) == fits
    assert steps.watch.claimed.get("kit1") == claim[0]


def test_without_looking_nothing_is_compared() -> None:
    steps = Steps()
    steps.watch.look(False)
    steps.step({2: 1.0})
    steps.watch.look(True)
    steps.step()
    assert not steps.faults()
    steps.step({2: 2.0})
    assert list(steps.faults()) == ["foreign"]
