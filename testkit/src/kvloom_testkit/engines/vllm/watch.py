"""Looks at the scheduler's connector and at the KV memory of an engine in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvloom_testkit.engines.vllm.memory import POISON, Group

_NULL = 0
"""vLLM's block for those that it does not keep, with what nobody reads."""
_MOST = 5


@dataclass(slots=True)
class _Load:
    """Blocks that the connector is to fill."""

    blocks: list[list[tuple[int, int]]]
    """By group, the number of each block, and that of the request's token that it begins with."""
    end: int
    """The number of the first token behind those that were promised."""
    asynchronous: bool

    @property
    def all(self) -> set[int]:
        return {block for group in self.blocks for block, _ in group}


class Watch:
    """Wraps the connector's calls on the scheduler's side, and compares all blocks of all groups between steps.

    A block may change in a step if the model computes tokens in it, if the engine clears it or copies into it, or if
    it is being loaded.
    """

    def __init__(self, scheduler: Any, groups: Sequence[Group]) -> None:
        self.on = True
        self.claimed: dict[str, int] = {}
        """Number of tokens that the connector claimed last for each request."""
        self.when_asked: Callable[[], object] | None = None
        """Called once, after the connector was asked what it has of a request."""
        self.when_promised: Callable[[], object] | None = None
        """Called once, after a request's blocks are allocated and before the connector is told."""
        self.overwrites = False
        """Overwrite blocks that a step gives to a request as soon as the connector has been told of the step."""
        self._scheduler, self._groups = scheduler, groups
        layers = [layer for group in groups for layer in group.layers]
        self._layers = list({(one.data_ptr(), one.shape, one.stride()): one for one in layers}.values())
        self._before: list[torch.Tensor] = []
        self._locally: dict[str, tuple[int, bool]] = {}
        self._loads: dict[str, _Load] = {}
        self._allowed: set[int] = set()
        self._given: set[int] = set()
        """Blocks that this step computes in, and that hold nothing which a request computed or loaded before."""
        self._faults: dict[str, list[str]] = {}
        self._steps = self._count = 0
        self._wrap()

    def look(self, on: bool) -> None:
        """Compare blocks in every step from now on, or not."""
        self.on, self._before = on, []

    def take(self) -> dict[str, Any]:
        """Faults by kind, `claims`, `unfilled` and `foreign`, with the numbers of steps and loads; none are kept."""
        found = {"faults": self._faults, "steps": self._steps, "loads": self._count}
        self._faults, self._steps, self._count = {}, 0, 0
        return found

    def keep_poison(self, clear: Callable[[list[int]], object]) -> Callable[[list[int]], object]:
        """A worker's function that sets new blocks to zero, but for those that are about to be loaded."""

        def cleared(blocks: list[int]) -> None:
            promised = {block for load in self._loads.values() for block in load.all} if self.on else set()
            clear([block for block in blocks if block not in promised])

        return cleared

    def overwrite_after(self, bind: Callable[..., object]) -> Callable[..., None]:
        """Wrap `bind`, after which a connector knows all of a step and reads none of these blocks any more."""

        def bound(*args: Any, **kwargs: Any) -> None:
            bind(*args, **kwargs)
            if self.overwrites:
                for layer in self._layers:
                    layer[list(self._given)] = POISON

        return bound

    def _wrap(self) -> None:
        scheduler, connector = self._scheduler, self._scheduler.connector
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._allowed = self._computed(output)
            return output

        def updated(output: Any, result: Any) -> Any:
            self._compare(getattr(result, "kv_connector_output", None))
            return update(output, result)

        scheduler.schedule, scheduler.update_from_output = scheduled, updated
        if connector is None:
            return
        matched, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

        def claim(request: Any, num_computed_tokens: int) -> Any:
            answer = matched(request, num_computed_tokens)
            count, asynchronous = answer
            if self.when_asked is not None:
                self.when_asked()
                self.when_asked = None
            if count is not None:
                self._locally[request.request_id] = (num_computed_tokens, asynchronous)
                self.claimed[_asked_as(request)] = count
                self._check_claim(request, num_computed_tokens, count, asynchronous)
            return answer

        def allocate(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            if num_external_tokens > 0:
                self._promise(request, blocks.get_block_ids(), num_external_tokens)
                if self.when_promised is not None:
                    self.when_promised()
                    self.when_promised = None
            return allocated(request, blocks, num_external_tokens)

        connector.get_num_new_matched_tokens, connector.update_state_after_alloc = claim, allocate

    def _check_claim(self, request: Any, local: int, count: int, asynchronous: bool) -> None:
        most = request.num_tokens - local - (not asynchronous)
        if not 0 <= count <= max(most, 0):
            kind = "asynchronous" if asynchronous else "synchronous"
            text = f"{count} tokens claimed behind {local} of {request.num_tokens}, {kind}: at most {most} there"
            self._fault("claims", text)
        if not count and asynchronous:
            self._fault("claims", "no tokens claimed, and a load in the background announced")

    def _promise(self, request: Any, ids: Sequence[Sequence[int]], count: int) -> None:
        local, asynchronous = self._locally.get(request.request_id, (0, False))
        blocks, end = [], local + count
        for group, given in zip(self._groups, ids, strict=True):
            first = local // group.block
            numbered = enumerate(given[first : -(-end // group.block)], first)
            blocks.append([(block, number * group.block) for number, block in numbered if block != _NULL])
        load = self._loads[request.request_id] = _Load(blocks, end, asynchronous)
        self._count += 1
        if self.on and not self._is_shared(load.all):
            for group, promised in zip(self._groups, blocks, strict=True):
                group.poison([block for block, _ in promised])

    def _is_shared(self, blocks: set[int]) -> bool:
        pool = self._scheduler.kv_cache_manager.block_pool
        return any(pool.blocks[one].ref_cnt > 1 for one in blocks)

    def _computed(self, output: Any) -> set[int]:
        """Blocks in which the model computes tokens in this step, and those that the engine itself writes to."""
        self._given = set()
        found = set(getattr(output, "new_block_ids_to_zero", None) or ())
        found.update(target for _, target in getattr(output, "kv_cache_block_copies", None) or ())
        for name in output.num_scheduled_tokens:
            if (request := self._scheduler.requests.get(name)) is None:
                continue
            done = request.num_computed_tokens - output.num_scheduled_tokens[name]
            for group, ids in zip(self._groups, self._scheduler.kv_cache_manager.get_block_ids(name), strict=True):
                found.update(ids[max(done, 0) // group.block :])
                self._given.update(ids[-(-max(done, 0) // group.block) :])
        return found

    def _compare(self, told: Any) -> None:
        loading = {block for load in self._loads.values() for block in load.all}
        if self.on and self._layers:
            self._steps += 1
            self._compare_blocks(self._allowed | loading | {_NULL})
        self._finish_loads(told)

    def _compare_blocks(self, allowed: set[int]) -> None:
        if not self._before:
            self._before = [one.clone() for one in self._layers]
            return
        changed: set[int] = set()
        for now, before in zip(self._layers, self._before, strict=True):
            if not torch.equal(now, before):
                changed.update((now != before).flatten(1).any(1).nonzero().flatten().tolist())
        pool = self._scheduler.kv_cache_manager.block_pool
        for block in sorted(changed - allowed):
            held = "another request holds" if pool.blocks[block].ref_cnt else "is free"
            self._fault("foreign", f"block {block}, which {held}, was written to")
        for now, before in zip(self._layers, self._before, strict=True):
            for block in changed:
                before[block] = now[block]

    def _finish_loads(self, told: Any) -> None:
        bad = set(getattr(told, "invalid_block_ids", ()) or ())
        failed = set(getattr(told, "failed_recving", ()) or ())
        came = set(getattr(told, "finished_recving", ()) or ())
        for name in list(self._loads):
            load, request = self._loads[name], self._scheduler.requests.get(name)
            if load.asynchronous and name not in came | failed and request is not None:
                continue
            del self._loads[name]
            if name in failed or request is None or request.is_finished() or not self.on:
                continue  # a load for a request that was aborted need not be done, though it is waited for
            # Behind what was promised, the step may have computed some.
            filled = load.end if load.asynchronous else max(load.end, request.num_computed_tokens)
            for group, blocks in zip(self._groups, load.blocks, strict=True):
                if bad & load.all and not bad.intersection(block for block, _ in blocks):
                    continue  # they may be computed again with those of another group
                for block, begin in blocks:
                    if block in bad:
                        break  # and those behind it are computed
                    if group.is_poisoned(block, min(filled - begin, group.block)):
                        self._unfilled(block, [one for one, _ in blocks], min(load.end - begin, group.block), group)

    def _unfilled(self, block: int, blocks: list[int], slots: int, group: Group) -> None:
        part = f", {slots} of its {group.block} tokens," if slots < group.block else ""
        self._fault("unfilled", f"block {block} of {blocks}{part} was promised and has old content in it")

    def _fault(self, kind: str, text: str) -> None:
        found = self._faults.setdefault(kind, [])
        if len(found) < _MOST:
            found.append(text)


def _asked_as(request: Any) -> str:
    """A request's name without what vLLM appends to make it unique."""
    return str(request.request_id).partition("-")[0]
