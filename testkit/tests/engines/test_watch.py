"""Writes to blocks, promises and claims are seen in the step in which they are made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvloom_testkit.engines.vllm.memory import Group, bits
from kvloom_testkit.engines.vllm.watch import Watch

BLOCK, BLOCKS = 4, 12
IDS = ([3, 1, 5], [0, 7, 9])
"""Blocks of the request in two groups; the second has given one back."""


class Request(SimpleNamespace):
    request_id = "kit1-abc"
    num_tokens = 13
    num_computed_tokens = 0
    aborted = False

    def is_finished(self) -> bool:
        return self.aborted


class Scheduler:
    """As much of vLLM's scheduler as the watch looks at; one request, whose blocks are `IDS` of as many groups."""

    def __init__(self, groups: int) -> None:
        self.ids = IDS[:groups]
        held = {block for group in self.ids for block in group}
        pool = SimpleNamespace(blocks=[SimpleNamespace(ref_cnt=int(number in held)) for number in range(BLOCKS)])
        self.kv_cache_manager = SimpleNamespace(block_pool=pool, get_block_ids=lambda name: self.ids)
        self.request = Request()
        self.requests = {self.request.request_id: self.request}
        self.claim: tuple[int | None, bool] = (8, False)
        self.connector = SimpleNamespace(
            get_num_new_matched_tokens=lambda request, computed: self.claim,
            update_state_after_alloc=lambda request, blocks, count: None,
        )

    def schedule(self) -> Any:
        scheduled = {self.request.request_id: self.scheduled} if self.scheduled else {}
        return SimpleNamespace(num_scheduled_tokens=scheduled, **self.more)

    def update_from_output(self, output: Any, result: Any) -> str:
        return "updated"

    scheduled = 5
    more: dict[str, Any] = {}  # noqa: RUF012


class Steps:
    """A watch, the memory that it looks at, and steps. Of two groups, the second is all in the memory of one layer."""

    def __init__(self, dtype: torch.dtype = torch.float32, groups: int = 1) -> None:
        self.scheduler = Scheduler(groups)
        self.caches = [torch.zeros(BLOCKS, 2, BLOCK, 4).to(dtype) for _ in range(2)]
        layers = [bits(one) for one in self.caches]
        self.watch = Watch(self.scheduler, [Group(BLOCK, layers), Group(BLOCK, layers[1:])][:groups])
        self.scheduler.scheduled = 0
        self.step()

    def poisoned(self, block: int) -> list[bool]:
        """For each layer, whether a block has in it what nobody loaded."""
        return [Group(BLOCK, [bits(one)]).is_poisoned(block, BLOCK) for one in self.caches]

    def promise(self, local: int = 0) -> None:
        connector, request = self.scheduler.connector, self.scheduler.request
        count, _ = connector.get_num_new_matched_tokens(request, local)
        if count:
            blocks = SimpleNamespace(get_block_ids=lambda: self.scheduler.ids)
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
    assert all(steps.poisoned(3) + steps.poisoned(1)) and not any(steps.poisoned(5))
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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_of_a_block_that_was_promised_in_part_that_part_is_filled(asynchronous: bool) -> None:
    steps = Steps()
    steps.scheduler.claim = (11, asynchronous)  # two blocks, and three tokens of the third
    told = {"finished_recving": {Request.request_id}} if asynchronous else {}

    def load(slots: int, computed: int = 0) -> list[str]:
        steps.promise()
        for cache in steps.caches:
            cache[5, :, :slots] = 1.0
            cache[5, :, BLOCK - computed :] = 1.0
        steps.scheduler.request.num_computed_tokens = 11 + computed
        steps.step({3: 1.0, 1: 1.0}, **told)
        return steps.faults().get("unfilled", [])

    assert not load(4) and not load(3)
    assert load(2) == load(0) == ["block 5 of [3, 1, 5], 3 of its 4 tokens, was promised and has old content in it"]
    if not asynchronous:
        assert not load(3, computed=1), "computed in the same step"
        assert len(load(2, computed=1)) == 1


def test_a_load_behind_local_blocks_fills_those_behind() -> None:
    steps = Steps()
    steps.promise(local=4)
    assert all(steps.poisoned(1)) and not any(steps.poisoned(3))
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


def test_every_group_is_watched() -> None:
    steps = Steps(groups=2)
    steps.promise(local=4)
    assert all(steps.poisoned(1)) and steps.poisoned(7) == [False, True] and not any(steps.poisoned(0))
    steps.step({1: 1.0, 5: 1.0})
    seven, nine = steps.faults()["unfilled"]
    assert seven == "block 7 of [7, 9] was promised and has old content in it" and nine.startswith("block 9 of")
    steps.step({9: 1.0})
    assert len(steps.faults()["foreign"]) == 1
    steps.scheduler.scheduled, steps.scheduler.request.num_computed_tokens = 5, 10
    steps.step({7: 2.0, 1: 2.0})
    assert not steps.faults(), "both groups' blocks of the sixth token"


def test_a_load_of_one_group_that_fails_may_end_that_of_others() -> None:
    steps = Steps(groups=2)
    steps.promise(local=4)
    steps.step({7: 1.0}, invalid_block_ids={9})
    assert not steps.faults()


def test_blocks_that_the_engine_clears_or_copies_may_change_and_promised_ones_are_not_cleared() -> None:
    steps = Steps()
    steps.scheduler.more = {"new_block_ids_to_zero": [2], "kv_cache_block_copies": [(2, 4)]}
    steps.step({2: 1.0, 4: 1.0})
    assert not steps.faults()
    cleared: list[int] = []
    clear = steps.watch.keep_poison(cleared.extend)
    steps.promise()
    clear([3, 6, 1])
    assert cleared == [6]
    steps.step({3: 1.0, 1: 1.0})
    clear([3])
    assert cleared == [6, 3]


def test_blocks_that_a_step_gives_to_a_request_are_overwritten_if_asked() -> None:
    steps = Steps()
    told: list[bool] = []
    bind = steps.watch.overwrite_after(lambda orders: told.append(any(steps.poisoned(5))))
    steps.scheduler.scheduled, steps.scheduler.request.num_computed_tokens = 5, 10  # from the sixth token on
    steps.scheduler.schedule()
    bind("orders")
    assert not any(steps.poisoned(5))
    steps.watch.overwrites = True
    bind("orders")
    assert told == [False, False], "only when the connector knows"
    assert all(steps.poisoned(5)) and not any(steps.poisoned(3) + steps.poisoned(1)), "the second has a token already"


def test_a_load_for_an_aborted_request_need_not_be_done() -> None:
    steps = Steps()
    steps.scheduler.claim = (8, True)
    steps.promise()
    steps.scheduler.request.aborted = True
    steps.step()
    steps.step({3: 1.0}, finished_recving={Request.request_id})
    assert not steps.faults()
    steps.step({1: 1.0})
    assert list(steps.faults()) == ["foreign"], "when it was reported it has ended"


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
