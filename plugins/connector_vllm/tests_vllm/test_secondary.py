"""`KVLoomTier` below vLLM's own tiering manager, over a host memory that is not shared with any worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

vllm = pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import (  # noqa: E402
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (  # noqa: E402
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: E402
from vllm.v1.kv_offload.tiering.manager import (  # noqa: E402
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

ROWS, ROW = 8, 4096
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(6)]


class Region:
    """Host memory as vLLM's managers ask for it."""

    def __init__(self) -> None:
        self.memory = bytearray(ROWS * ROW)

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.memory).cast("B", (ROWS, ROW))

    def cleanup(self) -> None:
        pass


class Host:
    """vLLM's tiering manager over `Region`, with kvloom as its only secondary tier."""

    def __init__(self, folder: Path, model: Path, **tier: Any) -> None:
        parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(128, ("a", "b"), 0),), worker_kv_bytes_per_block=ROW,
            enable_kv_cache_events=False, extra_config={}, engine_id="e",
            model=OffloadingModelConfig(str(model), "float32"), cache=OffloadingCacheConfig(128, 1), parallel=parallel,
            kv_cache_layout="LBHNC",
        )  # fmt: skip
        self.region = Region()
        primary = CPUPrimaryTierOffloadingManager(ROWS, self.region)  # type: ignore[arg-type]
        tiers = {"tiers": [{"type": "disk", "path": str(folder / "kv")}]}
        told = {
            "type": "KVLoomTier", "module_path": "kvloom_connector_vllm.adapter.secondary", "config": tiers, **tier,
        }  # fmt: skip
        spec: Any = SimpleNamespace(config=config)
        self.tier = SecondaryTierFactory.create_secondary_tier(told, primary.get_kv_memoryview(), spec)
        self.manager = TieringOffloadingManager(primary, [self.tier])

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not true():
            self.step()
            assert time.monotonic() < end
            time.sleep(0.001)

    def put(self, keys: list[OffloadKey]) -> None:
        context = ReqContext("writer")
        self.manager.on_new_request(context)
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None and prepared.keys_to_store == keys
        for key, row in zip(keys, prepared.store_spec.block_ids, strict=True):  # type: ignore[attr-defined]
            self.region.memory[row * ROW : (row + 1) * ROW] = key[:1] * ROW
        self.manager.complete_store(keys, context)
        self.manager.on_request_finished(context)
        self.until(lambda: not self.manager.has_pending_work())
        self.tier.store.flush()  # type: ignore[attr-defined]

    def look(self, keys: list[OffloadKey], context: ReqContext) -> list[LookupResult]:
        found: list[LookupResult] = []

        def known() -> bool:
            found[:] = [self.manager.lookup(key, context) for key in keys]
            return set(found) <= {LookupResult.HIT, LookupResult.MISS}

        self.until(known)
        return found


Make = Callable[..., Host]


@pytest.fixture
def make(tiny: Path, tmp_path: Path) -> Iterator[Make]:
    hosts: list[Host] = []

    def make(**tier: Any) -> Host:
        hosts.append(Host(tmp_path, tiny, **tier))
        return hosts[-1]

    yield make
    for host in hosts:
        host.manager.shutdown()


def request(host: Host, name: str) -> ReqContext:
    context = ReqContext(name)
    host.manager.on_new_request(context)
    return context


def test_a_fresh_process_gets_the_same_rows(make: Make) -> None:
    one = make()
    one.put(KEYS[:3])
    other = make()
    context = request(other, "reader")
    assert other.look(KEYS[:4], context) == [LookupResult.HIT] * 3 + [LookupResult.MISS]
    places = other.manager.prepare_load(KEYS[:3], context)
    for key, row in zip(KEYS[:3], places.block_ids, strict=True):  # type: ignore[attr-defined]
        assert other.region.memory[row * ROW : (row + 1) * ROW] == key[:1] * ROW
    other.manager.complete_load(KEYS[:3], context)


def test_damage_is_a_miss_of_its_own_row_only(make: Make, tmp_path: Path) -> None:
    make().put(KEYS[:3])
    blob = sorted(path for path in (tmp_path / "kv").rglob("[0-9]*-*") if path.is_file())[1]
    data = bytearray(blob.read_bytes())
    data[-20] ^= 1
    blob.write_bytes(data)
    other = make()
    context = request(other, "reader")
    found = other.look(KEYS[:3], context)
    assert sorted(one.name for one in found) == ["HIT", "HIT", "MISS"]
    whole = [key for key, one in zip(KEYS, found, strict=False) if one is LookupResult.HIT]
    places = other.manager.prepare_load(whole, context)
    for key, row in zip(whole, places.block_ids, strict=True):  # type: ignore[attr-defined]
        assert other.region.memory[row * ROW : (row + 1) * ROW] == key[:1] * ROW


def test_what_differs_is_not_shared(make: Make) -> None:
    make(revision="one").put(KEYS[:1])
    other = make(revision="two")
    assert other.look(KEYS[:1], request(other, "reader")) == [LookupResult.MISS]


def test_a_reset_waits_for_what_is_under_way(make: Make) -> None:
    make().put(KEYS[:3])
    other = make()
    context = request(other, "reader")
    other.until(lambda: other.manager.lookup(KEYS[0], context) is LookupResult.HIT_PENDING)
    other.step()
    other.manager.reset_cache()
    context = request(other, "again")
    assert other.look(KEYS[:1], context) == [LookupResult.HIT]
