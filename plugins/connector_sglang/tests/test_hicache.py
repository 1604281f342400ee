"""The storage that SGLang's own factory makes, driven as its cache controller drives it.

Needs two modules of SGLang and none of what they drive: they are taken from an installed SGLang, from the wheel that
SGLANG_WHEEL names, or from the package index.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom import ConfigError, KVSpec
from kvloom_connector_sglang.testing import pool_of
from kvloom_testkit import HostPool
from kvloom_testkit.engines.running import check
from kvloom_testkit.engines.sglang import wheel
from kvloom_testkit.engines.sglang.requirements import StorageConformance
from kvloom_testkit.engines.sglang.storages import Storage, StorageBench

pytestmark = pytest.mark.slow

SPEC = KVSpec("m", num_layers=3, num_kv_heads=2, head_size=8, dtype="bfloat16")
PAGE = 4


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for the path of imports, with SGLang in it."""
    try:
        return wheel.path(tmp_path_factory.mktemp("sglang"))
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def sglang(search: Path) -> Iterator[types.ModuleType]:
    """`sglang.srt.mem_cache.storage`, without what importing all of SGLang needs and changes."""
    package = types.ModuleType("sglang")
    package.__path__ = [str(search / "sglang")]
    sys.modules["sglang"] = package
    try:
        yield importlib.import_module("sglang.srt.mem_cache.storage")
    finally:
        for name in [
            name for name in sys.modules if name.partition(".")[0] == "sglang" or name.endswith("sglang.hicache")
        ]:
            del sys.modules[name]


@pytest.fixture
def types_of(sglang: types.ModuleType) -> types.ModuleType:
    return importlib.import_module("sglang.srt.mem_cache.hicache_storage")


def yaml(place: Path, text: str = "") -> str:
    file = place / "sglang.yaml"
    file.write_text(text or f"connector: sglang\ntiers:\n  - memory\n  - {{type: disk, path: {place / 'kv'}}}\n")
    return str(file)


def created(sglang: types.ModuleType, place: Path, pool: Any = None, *, file: str = "", **changes: Any) -> Any:
    """A storage made in the way of `HiCacheController.attach_storage_backend`."""
    extra = {
        "backend_name": "kvloom", "module_path": "kvloom_connector_sglang.hicache", "class_name": "KVLoomHiCache",
        "interface_v1": 1, "config": file or yaml(place), **changes.pop("extra", {}),
    }  # fmt: skip
    settings = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False, "model_name": "a/model",
        "extra_config": extra, **changes,
    }  # fmt: skip
    storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage").HiCacheStorageConfig(**settings)
    pool = pool or pool_of(SPEC, 16)
    made = sglang.StorageBackendFactory.create_backend("dynamic", storage, pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def filled(seed: int, **settings: Any) -> HostPool:
    pool = pool_of(SPEC, 16, **settings)
    torch.manual_seed(seed)
    pool.kv_buffer.copy_(torch.randn_like(pool.kv_buffer))
    return pool


def hashes(count: int) -> list[str]:
    """A chain, as SGLang makes one."""
    found = [hashlib.sha256(b"seed").hexdigest()]
    for _ in range(count):
        found.append(hashlib.sha256(bytes.fromhex(found[-1])).hexdigest())
    return found[1:]


def rows(*pages: int) -> torch.Tensor:
    """`host_indices`: every row of each page."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_outlive_the_server(sglang: types.ModuleType, types_of: Any, tmp_path: Path, layout: str) -> None:
    there, here, keys = filled(1, layout=layout), pool_of(SPEC, 16, layout=layout), hashes(5)
    info = types_of.HiCacheStorageExtraInfo(prefix_keys=[])
    before = created(sglang, tmp_path, there)
    assert before.batch_exists(keys, info) == 0
    assert before.batch_set_v1(keys[:3], rows(4, 9, 1), info) == [True] * 3
    before.close()
    after = created(sglang, tmp_path, here)
    assert after.batch_exists(keys, info) == 3 and after.exists(keys[2]) and not after.exists(keys[3])
    assert after.batch_get_v1(keys[:4], rows(0, 1, 2, 3), info) == [True, True, True, False]
    for source, target in zip((4, 9, 1), (0, 1, 2), strict=True):
        assert torch.equal(there.page(source * PAGE), here.page(target * PAGE))
    assert not here.page(3 * PAGE).any()
    after.close()
    after.close()


def test_pages_as_tensors(sglang: types.ModuleType, tmp_path: Path) -> None:
    pool, keys = filled(2), hashes(4)
    made = created(sglang, tmp_path, pool)
    pages = [pool.get_data_page(n * PAGE) for n in range(3)]
    assert made.batch_set(keys[:2], pages[:2]) is True and made.set(keys[2], pages[2]) is True
    places = [pool.get_dummy_flat_data_page() for _ in keys]
    got = made.batch_get(keys, places)
    assert [one is None for one in got] == [False, False, False, True]
    assert all(torch.equal(one, page) and one is place for one, page, place in zip(got, pages, places, strict=False))
    assert torch.equal(made.get(keys[1]), pages[1]) and made.get(keys[3]) is None
    assert made.get(keys[0], places[3]) is places[3]
    made.close()


def test_of_ranks_with_the_same_kv_one_writes(sglang: types.ModuleType, tmp_path: Path) -> None:
    pool, keys = filled(3), hashes(2)
    settings = {"is_mla_model": True, "tp_size": 2}
    second = created(sglang, tmp_path, pool, tp_rank=1, **settings)
    assert second.batch_set_v1(keys, rows(0, 1)) == [True, True] and second.batch_set(keys, None) is True
    assert second.batch_exists(keys) == 0
    first = created(sglang, tmp_path, pool, tp_rank=0, **settings)
    assert first.batch_set_v1(keys, rows(0, 1)) == [True, True]
    first.close()
    assert second.batch_exists(keys) == 2
    second.close()


def test_ranks_with_parts_of_the_kv_keep_them_apart(sglang: types.ModuleType, tmp_path: Path) -> None:
    keys, pools = hashes(2), [filled(4), filled(5)]
    ranks = [created(sglang, tmp_path, pool, tp_rank=rank, tp_size=2) for rank, pool in enumerate(pools)]
    for rank in ranks:
        assert rank.batch_set_v1(keys, rows(0, 1)) == [True, True]
    for rank, pool in zip(ranks, pools, strict=True):
        assert rank.batch_get_v1(keys, rows(2, 3)) == [True, True]
        assert torch.equal(pool.page(0), pool.page(2 * PAGE))
        rank.close()


def test_nothing_raises_into_the_engines_threads(sglang: types.ModuleType, types_of: Any, tmp_path: Path) -> None:
    made, keys = created(sglang, tmp_path, filled(6)), hashes(3)
    wrong = [rows(0, 1), rows(0, 1, 2, 3), torch.tensor([]), None, "rows", rows(0, 1, 99)]
    assert [made.batch_set_v1(keys, each) for each in wrong] == [[False] * 3] * 6
    assert [made.batch_get_v1(keys, each) for each in wrong] == [[False] * 3] * 6
    assert made.batch_set(keys, [None] * 3) is False and made.batch_set(keys, [torch.zeros(2)] * 3) is False
    assert made.batch_set(keys, None) is False and made.set(keys[0]) is False
    assert made.batch_get(keys, [torch.zeros(2)] * 3) == [None] * 3
    assert made.counts()["refused"] > 0 and made.counts()["failed"] > 0
    made.close()
    assert made.batch_exists(keys) == 0 and made.batch_get_v1(keys, rows(0, 1, 2)) == [False] * 3
    assert made.batch_set_v1(keys, rows(0, 1, 2)) == [False] * 3 and made.clear() is False


def test_clear_and_stats(sglang: types.ModuleType, tmp_path: Path) -> None:
    made, keys = created(sglang, tmp_path, filled(7), enable_storage_metrics=True), hashes(3)
    made.batch_set_v1(keys, rows(0, 1, 2))
    made.batch_get_v1(keys[:2], rows(3, 4))
    metrics = types.ModuleType("sglang.srt.observability.metrics_collector")
    metrics.StorageMetrics = types.SimpleNamespace  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patched:  # the real one needs all of SGLang
        patched.setitem(sys.modules, metrics.__name__, metrics)
        stats = made.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [2])
        assert all(speed > 0 for speed in (*stats.backup_bandwidth, *stats.prefetch_bandwidth))
        assert made.get_stats().backup_pgs == []
    assert made.clear() is True and made.batch_exists(keys) == 0
    made.close()
    assert created(sglang, tmp_path).get_stats() is None


def test_the_pool_of_kv_by_the_second_interface(sglang: types.ModuleType, types_of: Any, tmp_path: Path) -> None:
    pool, keys = filled(8), hashes(4)
    made = created(sglang, tmp_path, pool)
    name, transfer = types_of.PoolName, types_of.PoolTransfer
    made.register_mem_host_pool_v2(pool, name.KV)
    made.on_host_pools_registered()
    kv = transfer(name=name.KV, keys=keys[:3], host_indices=rows(0, 1, 2))
    mamba = transfer(name=name.MAMBA, keys=keys[:1], host_indices=rows(0))
    assert made.batch_set_v2([kv, mamba]) == {name.KV: [True] * 3, name.MAMBA: [False]}
    there = transfer(name=name.KV, keys=keys[:3], host_indices=rows(5, 6, 7))
    assert made.batch_get_v2([there, mamba]) == {name.KV: [True] * 3, name.MAMBA: [False]}
    assert torch.equal(pool.page(0), pool.page(5 * PAGE))
    found = made.batch_exists_v2(keys, [kv])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages) == (3, {"kv": 3}, [1, 2, 3])
    assert made.batch_exists_v2(keys).kv_hit_pages == 3
    assert made.batch_exists_v2(keys, [mamba]).kv_hit_pages == 0
    optional = transfer(name=name.DEEPSEEK_V4_C4, hit_policy=types_of.PoolHitPolicy.BLOCK_GROUPS)
    assert made.batch_exists_v2(keys, [optional]).kv_hit_pages == 3
    made.close()


def test_models_with_other_pools_are_refused_by_name(sglang: types.ModuleType, types_of: Any, tmp_path: Path) -> None:
    made = created(sglang, tmp_path)
    made.register_mem_host_pool_v2(None, types_of.PoolName.MAMBA)
    made.register_mem_host_pool_v2(None, types_of.PoolName.SWA)
    with pytest.raises(NotImplementedError, match="stores the pool kv only, but this model also has mamba, swa"):
        made.on_host_pools_registered()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"config": None}, r"^hicache_storage_backend_extra_config\.config: missing"),
        (
            {"config": None, "revision": 3, "timeout": 0},
            r"(?s)^hicache_storage_backend_extra_config\.config: .*\n.*\.revision: .*\n.*\.timeout: ",
        ),
        ({"revision": 3}, r"^hicache_storage_backend_extra_config\.revision: expected text"),
        *(
            ({"timeout": seconds}, r"^hicache_storage_backend_extra_config\.timeout: expected seconds")
            for seconds in (0, math.nan, math.inf, 10**400)
        ),
    ],
)
def test_settings_that_cannot_work(
    sglang: types.ModuleType, tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        created(sglang, tmp_path, extra=extra)


def test_a_file_that_is_wrong_is_said_at_start(sglang: types.ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.0"):
        created(sglang, tmp_path, file=yaml(tmp_path, "tiers: [{type: disk, path: x, sise: 3}]"))


def test_two_revisions_share_nothing(sglang: types.ModuleType, tmp_path: Path) -> None:
    keys = hashes(2)
    made = created(sglang, tmp_path, filled(9), extra={"revision": "one"})
    assert made.batch_set_v1(keys, rows(0, 1)) == [True, True]
    made.close()
    for revision, count in (("two", 0), ("one", 2)):
        other = created(sglang, tmp_path, extra={"revision": revision})
        assert other.batch_exists(keys) == count
        other.close()


def test_behind_sglangs_own_injector_of_failures(
    sglang: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The factory can wrap what it makes in a proxy: every method of ours has the name and place that it calls."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0")
    made, keys = created(sglang, tmp_path, filled(10)), hashes(2)
    assert type(made).__name__ == "HiCacheStorageFailureInjector"
    assert made.batch_set_v1(keys, rows(0, 1)) == [True, True]
    assert made.batch_exists(keys) == 2 and made.batch_get_v1(keys, rows(2, 3)) == [True, True]


def test_it_meets_the_requirements_of_storages(search: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(search), os.environ.get("PYTHONPATH")])))
    tiers = [{"type": "memory", "capacity": "64MiB"}, {"type": "disk", "path": "{tmp}", "capacity": "1GiB"}]
    extra = {"interface_v1": 1, "config": {"connector": "sglang", "tiers": tiers}}
    subject = Storage.named("kvloom_connector_sglang.hicache:KVLoomHiCache", extra=extra)
    bench = StorageBench(subject, short=True)
    try:
        rows = check(bench, StorageConformance)
    finally:
        bench.close()
    assert [row for row in rows if row.outcome != "met"] == []
