"""Looks at the scheduler's connector and at the KV memory of an engine in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

POISON = 768.0
"""Written to blocks that are about to be loaded; exact in every float type, and no value of a real K or V."""
_BITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}  # NaN is not equal to itself
_MOST = 5


@dataclass(slots=True)
class _Load:
    """Blocks that the connector is to fill, whole ones first."""

    blocks: list[int]
    whole: int
    asynchronous: bool


class Watch:
    """Wraps the connector's calls on the scheduler's side, and compares all blocks between steps.

    A block may change in a step if the model computes tokens in it, or if it is being loaded. It sees only models
    whose KV is in one group.
    """

    def __init__(self, scheduler: Any, caches: Sequence[torch.Tensor]) -> None:
        self.on = True
        self.claimed: dict[str, int] = {}
        """Number of tokens that the connector claimed last for each request."""
        self.when_promised: Callable[[], object] | None = None
        """Called once, after a request's blocks are allocated and before the connector is told."""
        self._scheduler = scheduler
        groups = scheduler.kv_cache_config.kv_cache_groups
        self._caches = [one for one in caches if isinstance(one, torch.Tensor)] if len(groups) == 1 else []
        self._block = scheduler.block_size
        self._before: list[torch.Tensor] = []
        self._locally: dict[str, tuple[int, bool]] = {}
        self._loads: dict[str, _Load] = {}
        self._allowed: set[int] = set()
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
            if count is not None:
                self._locally[request.request_id] = (num_computed_tokens, asynchronous)
                self.claimed[_asked_as(request)] = count
                self._check_claim(request, num_computed_tokens, count, asynchronous)
            return answer

        def allocate(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            if num_external_tokens > 0:
                self._promise(request, blocks.get_block_ids()[0], num_external_tokens)
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

    def _promise(self, request: Any, ids: Sequence[int], count: int) -> None:
        local, asynchronous = self._locally.get(request.request_id, (0, False))
        first = local // self._block
        blocks = list(ids[first : -(-(local + count) // self._block)])
        self._loads[request.request_id] = _Load(blocks, count // self._block, asynchronous)
        self._count += 1
        if self.on and not self._is_shared(blocks):
            for cache in self._caches:
                cache[blocks] = POISON

    def _is_shared(self, blocks: Sequence[int]) -> bool:
        pool = self._scheduler.kv_cache_manager.block_pool
        return any(pool.blocks[one].ref_cnt > 1 for one in blocks)

    def _computed(self, output: Any) -> set[int]:
        """Blocks in which the model computes tokens in this step."""
        found: set[int] = set()
        for name in output.num_scheduled_tokens:
            if (request := self._scheduler.requests.get(name)) is None:
                continue
            (ids, *_) = self._scheduler.kv_cache_manager.get_block_ids(name)
            done = request.num_computed_tokens - output.num_scheduled_tokens[name]
            found.update(ids[max(done, 0) // self._block :])
        return found

    def _compare(self, told: Any) -> None:
        loading = {block for load in self._loads.values() for block in load.blocks}
        if self.on and self._caches:
            self._steps += 1
            self._compare_blocks(self._allowed | loading | {0})  # 0 is vLLM's null block, with what nobody reads
        self._finish_loads(told)

    def _compare_blocks(self, allowed: set[int]) -> None:
        if self._before:
            changed: set[int] = set()
            for now, before in zip(self._caches, self._before, strict=True):
                kept, other = (one.view(_BITS[one.element_size()]) for one in (now, before))
                if not torch.equal(kept, other):
                    rows = (kept != other).flatten(1).any(1)
                    changed.update(rows.nonzero().flatten().tolist())
            pool = self._scheduler.kv_cache_manager.block_pool
            for block in sorted(changed - allowed):
                held = "another request holds" if pool.blocks[block].ref_cnt else "is free"
                self._fault("foreign", f"block {block}, which {held}, was written to")
            for now, before in zip(self._caches, self._before, strict=True):
                for block in changed:
                    before[block] = now[block]
        else:
            self._before = [one.clone() for one in self._caches]

    def _finish_loads(self, told: Any) -> None:
        bad = set(getattr(told, "invalid_block_ids", ()) or ())
        failed = set(getattr(told, "failed_recving", ()) or ())
        came = set(getattr(told, "finished_recving", ()) or ())
        for name in list(self._loads):
            load = self._loads[name]
            if load.asynchronous and name not in came | failed and name in self._scheduler.requests:
                continue
            del self._loads[name]
            if name in failed or name not in self._scheduler.requests or not self.on:
                continue
            for block in load.blocks[: load.whole]:
                if block in bad:
                    break  # and those behind it are computed
                if any((cache[block] == POISON).any() for cache in self._caches):
                    self._fault("unfilled", f"block {block} of {load.blocks} was promised and has old content in it")

    def _fault(self, kind: str, text: str) -> None:
        found = self._faults.setdefault(kind, [])
        if len(found) < _MOST:
            found.append(text)


def _asked_as(request: Any) -> str:
    """A request's name without what vLLM appends to make it unique."""
    return str(request.request_id).partition("-")[0]
