"""The same simulation beside another connector, which loads within a step or in the background, and sometimes fails."""

from __future__ import annotations

from collections.abc import Sequence

from scheduling import Simulation, _Request
from test_planner_model import attended

from kvloom_connector_vllm.scheduling.plan import NULL, Scheduled


class Beside(Simulation):
    """Some requests get their KV from another connector, though kvloom may have offered it, too."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.within: dict[str, int] = {}
        """Tokens that are loaded in this step, which computes with them, by request."""
        self.background: dict[str, int] = {}
        """Tokens that are being loaded while the request waits."""

    def step(self) -> None:
        for name in [name for name in self.background if self.random.random() < 0.3]:
            self._over(name)
        super().step()
        self.within = {}

    def awaits_loads(self, scheduled: Sequence[Scheduled]) -> bool:
        for part in scheduled:
            one = self.requests[part.request]
            if part.request in self.within and self.random.random() < 0.4:
                one.wrong = True
        return bool(self.within)

    def written_by_others(self, rank: int) -> None:
        for name, tokens in self.within.items():
            self._write(rank, self.requests[name], tokens, right=not self.requests[name].wrong)
        for name, tokens in self.background.items():
            self._write(rank, self.requests[name], tokens, right=False)

    def failed_by_others(self) -> list[str]:
        wrong = [name for name in self.within if self.requests[name].wrong]
        self.done["wrong"] += len(wrong)
        return wrong

    def _started(self, name: str, one: _Request) -> Scheduled | None:
        tokens = self.random.randrange(0, one.its.num_tokens, self.unit)
        if not tokens or self.random.random() < 0.6:
            return super()._started(name, one)
        if one.known:
            self.scheduler.matched(one.its, self._owner(one), 0)
        within = self.random.random() < 0.6 and not any(group.state for group in self.groups)
        after = self.random.randint(tokens + 1, one.its.num_tokens) if within else tokens
        if not self._grow(one, after):
            return None
        self.scheduler.give(name, [list(table) for table in one.tables])
        self.done["others"] += 1
        one.computed = tokens
        if within:
            self.within[name] = tokens
            return self._running(name, one, after)
        self.background[name] = tokens
        one.loading = {-1}
        return None

    def _write(self, rank: int, one: _Request, tokens: int, *, right: bool) -> None:
        """Write the blocks that are attended to behind so many tokens: their KV, or something else."""
        blocks = self.workers[rank].blocks
        for number, (kind, group, table) in enumerate(zip(self.kinds, self.groups, one.tables, strict=True)):
            first = attended(kind, tokens).start // group.block_tokens * group.block_tokens
            for position in range(first, tokens) if self.names[rank][number] else ():
                block, place = divmod(position, group.block_tokens)
                if table[block] != NULL:
                    blocks[table[block]][place] = (number, one.digest(position), self.weights) if right else None

    def _over(self, name: str) -> None:
        tokens, one = self.background.pop(name), self.requests[name]
        one.loading.clear()
        if one.over:
            del self.requests[name]
            self._release(one)
        elif self.random.random() < 0.3:
            self._release(one)
        else:
            for rank in range(len(self.workers)):
                self._write(rank, one, tokens, right=True)
