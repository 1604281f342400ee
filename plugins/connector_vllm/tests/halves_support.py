"""The scheduler's and the workers' halves together, over real tiers, beside an engine that is only pretended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_fakes import BLOCK, FakeRequest, kv_cache_config, vllm_config

from kvloom import Engine
from kvloom_connector_vllm.configured import Settings, has_shared_tier
from kvloom_connector_vllm.identity import Identity, identify
from kvloom_connector_vllm.names import Names, owner_of
from kvloom_connector_vllm.scheduling.announcing import Announcer
from kvloom_connector_vllm.scheduling.messages import Report
from kvloom_connector_vllm.scheduling.plan import Group, Owner, Scheduled
from kvloom_connector_vllm.scheduling.planner import Planner
from kvloom_connector_vllm.scheduling.scheduler import Scheduler
from kvloom_connector_vllm.transfers import Part
from kvloom_connector_vllm.worker import Worker

NOBODY = Owner()
BLOCKS = 24
LAYERS = 3


class Pretended:
    """An engine of `ranks` ranks whose KV of a token is a digest of everything up to it, the layer and the rank."""

    orders: Sequence[torch.Tensor] | None = None
    """See `Worker.attach`."""

    def __init__(
        self, folder: Path, *, tiers: Sequence[Any], ranks: int = 1, asynchronous: bool = True, by_layer: bool = False,
        written_first: bool = False, **config: Any,
    ) -> None:  # fmt: skip
        known = kv_cache_config(LAYERS, num_blocks=BLOCKS)
        vllm = vllm_config(str(folder / "model"), tensor_parallel_size=ranks)
        identities = [identify(vllm, known, rank=rank, about={}) for rank in range(ranks)]
        extra = {
            "config": {"chunk_tokens": 2 * BLOCK, "tiers": list(tiers), **config},
            "async_load": asynchronous, "by_layer": by_layer,
        }  # fmt: skip
        self._open(Settings.read(extra, ranks=ranks), identities, written_first=written_first)

    def _open(self, settings: Settings, identities: Sequence[Identity], *, written_first: bool = False) -> None:
        """identities: of the only group, by rank."""
        opened, ranks = settings.opened(identities[0].geometry), len(identities)
        chunk = opened.chunk_tokens
        self.elements = identities[0].page_elements
        format = settings.connector.format
        specs = [one.of_rank(rank) for rank, one in enumerate(identities)]
        names = [
            [[Names(spec, one.geometry, format, chunk_tokens=chunk) for spec in its]]
            for one, its in zip(identities, specs, strict=True)
        ]
        planner = Planner(
            [Group(BLOCK, chunk)], hash_tokens=BLOCK, save_generated=opened.save_decode_cache, tails=opened.save_tails
        )
        self.index = None
        if has_shared_tier(opened):
            self.index = Engine.open(opened, identities[0].spec, role="index")
        announcer = Announcer(chunk_tokens=chunk, hash_tokens=BLOCK)
        self.asynchronous = settings.async_load
        self.scheduler = Scheduler(planner, names, self.index, announcer, asynchronous=self.asynchronous)
        self.engines = [Engine.open(opened, its[0]) for its in specs]
        self.parts = [
            [Part(engine if spec is its[0] else engine.sibling(spec, opened), name, BLOCK)
             for spec, name in zip(its, called, strict=True)]
            for engine, its, (called,) in zip(self.engines, specs, names, strict=True)
        ]  # fmt: skip
        self.workers = [
            Worker(
                [its], rank=rank, asynchronous=self.asynchronous, by_layer=settings.by_layer,
                written_first=written_first,
            )
            for rank, its in enumerate(self.parts)
        ]  # fmt: skip
        self.memory = [[torch.zeros(BLOCKS, self.elements) for _ in range(LAYERS)] for _ in range(ranks)]
        for worker, pages in zip(self.workers, self.memory, strict=True):
            worker.attach(pages, orders=self.orders)
        self.layers: Sequence[int | None] = range(LAYERS) if settings.by_layer else ()
        """Waited for before a step's computation."""
        self.see_layer: Callable[[int], None] = lambda layer: None
        """Called after each wait of a step that loads."""
        self.failed: set[int] = set()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def page(self, request: FakeRequest, block: int, layer: int, rank: int) -> torch.Tensor:
        """The content of a page of a request's KV, in float32 so that every bit counts."""
        seed = hash((tuple(request.tokens[: (block + 1) * BLOCK]), request.cache_salt, layer, rank))
        return torch.randn(self.elements, generator=torch.Generator().manual_seed(seed & 0xFFFFFFFF))

    def compute(self, request: FakeRequest, table: Sequence[int], first: int, last: int) -> None:
        for rank, pages in enumerate(self.memory):
            for layer, view in enumerate(pages):
                for block in range(first // BLOCK, last // BLOCK):
                    view[table[block]] = self.page(request, block, layer, rank)

    def right(self, request: FakeRequest, table: Sequence[int], tokens: int) -> bool:
        return all(
            torch.equal(view[table[block]], self.page(request, block, layer, rank))
            for rank, pages in enumerate(self.memory)
            for layer, view in enumerate(pages)
            for block in range(tokens // BLOCK)
        )

    def step(self, scheduled: Sequence[Scheduled] = (), compute: Any = lambda: None) -> set[str]:
        """One step of everybody; the requests whose loads are over on every rank."""
        orders = self.scheduler.orders(scheduled, idle=not scheduled)
        over: list[set[str]] = []
        for worker in self.workers:
            worker.fence(orders)
            worker.begin(orders)
            if not self.asynchronous:
                worker.load(wait=True)
                for layer in self.layers:
                    worker.wait_for_layer(layer)
                    if orders.step.loads:  # other steps wait for an answer of the tiers, as often as it takes
                        self.see_layer(layer)
        compute()
        report = Report()
        for worker in self.workers:
            if self.asynchronous:
                worker.load(wait=False)
            worker.save()
            over.append(worker.finished())
            self.failed |= worker.failed_blocks()
            said = worker.report()
            report = report if said is None else report.add(said)
        self.scheduler.report(report)
        return set.intersection(*over) if over else set()

    def step_until_over(self) -> set[str]:
        """Step until a load is over; the requests whose load is."""
        until = time.monotonic() + 60
        while not (over := self.step()):
            assert time.monotonic() < until, "a load never ends"
            time.sleep(0.001)
        return over

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Step until the workers have reported what makes it true."""
        until = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < until
            self.step()

    def matched(self, request: FakeRequest, local: int = 0) -> int:
        until = time.monotonic() + 20
        while (tokens := self.scheduler.matched(request, owner_of("", request.cache_salt or ""), local)) is None:
            assert time.monotonic() < until
            self.step()
        return tokens

    def serve(self, request: FakeRequest, table: Sequence[int]) -> int:
        """Load what can be loaded, compute the rest, save it; how many tokens were loaded."""
        tokens = self.matched(request)
        computed = tokens
        if tokens:
            self.scheduler.load(request, [table], tokens)
            before = set(self.failed)
            if self.asynchronous:
                left = dict.fromkeys(range(len(self.workers)), True)
                until = time.monotonic() + 20
                waiting = set(left)
                while waiting:
                    assert time.monotonic() < until, "a load never ends"
                    waiting -= self._over(request.request_id)
            else:
                self.step()
            failed = self.failed - before
            bad = [index for index, block in enumerate(table[: tokens // BLOCK]) if block in failed]
            self.failed -= failed
            computed = bad[0] * BLOCK if bad else tokens
        assert self.right(request, table, computed)
        part = Scheduled(request.request_id, [table], True, computed, request.num_tokens)
        self.step([part], lambda: self.compute(request, table, computed, request.num_tokens))
        self.settle()
        self.scheduler.end(request.request_id)
        return computed

    def _over(self, request: str) -> set[int]:
        orders = self.scheduler.orders(())
        over, report = set(), Report()
        for rank, worker in enumerate(self.workers):
            worker.fence(orders)
            worker.begin(orders)
            worker.load(wait=False)
            worker.save()
            if request in worker.finished():
                over.add(rank)
            self.failed |= worker.failed_blocks()
            said = worker.report()
            report = report if said is None else report.add(said)
        self.scheduler.report(report)
        return over

    def settle(self) -> None:
        """Steps without requests, until everything has been reported."""
        until = time.monotonic() + 20
        while self.scheduler.busy:
            assert time.monotonic() < until
            self.step()
        for engine in self.engines:
            assert engine.flush(20)
        self.step()


@pytest.fixture
def pretended(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(b"weights")
    with contextlib.ExitStack() as stack:

        def make(**settings: Any) -> Pretended:
            one = Pretended(tmp_path, **settings)
            stack.callback(one.close)
            return one

        yield make


def disk(tmp_path: Path) -> dict[str, Any]:
    return {"type": "disk", "path": str(tmp_path / "kv")}


MEMORY = {"type": "memory", "capacity": "64MiB"}
PROMPT = list(range(27))


def one_chunks(one: Pretended, tokens: list[int]) -> Any:
    one.scheduler.begin(FakeRequest("named", tokens[:]), NOBODY)
    return one.scheduler._planner.chunks("named")[0]
