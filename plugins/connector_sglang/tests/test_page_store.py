"""Pages in tiers, without SGLang: what is found, moved, kept apart and forgiven."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from clock_support import Hang, skipping_clock
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom import ConfigError, EngineConfig, KVSpec
from kvloom_backend_disk.backend import DiskBackend
from kvloom_connector_sglang import page_store
from kvloom_connector_sglang.connector import SGLangConnector
from kvloom_connector_sglang.identity import _warn, described
from kvloom_connector_sglang.page_store import PageStore
from kvloom_connector_sglang.testing import pool_of
from kvloom_testkit import HostPool

SPEC = KVSpec("m", num_layers=3, num_kv_heads=2, head_size=8, dtype="bfloat16")
STORAGE = types.SimpleNamespace(
    model_name="a/model", tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, dcp_rank=0,
    dcp_size=1, is_mla_model=False,
)  # fmt: skip
PAGES = 16


def page_keys(count: int, seed: str = "") -> list[str]:
    return [hashlib.sha256(f"{seed}{n}".encode()).hexdigest() for n in range(count)]


def storage(**changes: Any) -> Any:
    return types.SimpleNamespace(**{**vars(STORAGE), **changes})


def pool(seed: int | None = None, **settings: Any) -> HostPool:
    made = pool_of(SPEC, PAGES, **settings)
    if seed is not None:
        torch.manual_seed(seed)
        made.kv_buffer.copy_(torch.randn_like(made.kv_buffer))
    return made


def opened(config: Any = None, its: Any = STORAGE, where: HostPool | None = None, **settings: Any) -> PageStore:
    spec, geometry = described(its, where or pool(), revision=settings.pop("revision", ""))
    return PageStore(EngineConfig.load(config or {"tiers": [{"type": "memory"}]}), spec, geometry, **settings)


def on_disk(path: Path) -> dict[str, Any]:
    return {"tiers": [{"type": "disk", "path": str(path)}]}


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers) * 4


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_come_back_elsewhere_bit_for_bit_after_a_restart(tmp_path: Path, layout: str) -> None:
    there, here = pool(1, layout=layout), pool(layout=layout)
    keys = page_keys(3)
    store = opened(on_disk(tmp_path), where=there)
    assert store.set(keys, pool=there, rows=rows(5, 0, 9)) == [True] * 3
    store.close()
    again = opened(on_disk(tmp_path), where=here)
    assert again.exists([*keys, *page_keys(1, "other")]) == 3
    assert again.get(keys, pool=here, rows=rows(2, 3, 15)) == [True] * 3
    for before, after in zip((5, 0, 9), (2, 3, 15), strict=True):
        assert torch.equal(there.page(4 * before), here.page(4 * after))
    assert all(not here.page(4 * n).any() for n in range(PAGES) if n not in (2, 3, 15))
    assert again.counts() == {"read": 3, "not read": 0}
    again.close()
    again.close()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 7), unique=True, max_size=5)), max_size=8))
def test_it_does_what_a_dict_would_do(steps: list[tuple[bool, list[int]]]) -> None:
    store, model, keys = opened(), {}, page_keys(8)
    source, target = pool(2), pool()
    for number, (write, pages) in enumerate(steps):
        wanted = [keys[page] for page in pages]
        if write:
            first = [(page + number) % PAGES for page in pages]
            assert store.set(wanted, pool=source, rows=rows(*first)) == [True] * len(pages)
            for page, row in zip(pages, first, strict=True):
                model.setdefault(page, row)  # the same key is the same KV: what is there stays
            continue
        there = [page in model for page in pages]
        assert store.exists(wanted) == (there.index(False) if False in there else len(there))
        assert store.get(wanted, pool=target, rows=rows(*pages)) == there
        for page in (page for page in pages if page in model):
            assert torch.equal(target.page(4 * page), source.page(4 * model[page]))
    store.close()


def test_a_page_that_is_not_there_leaves_memory_alone() -> None:
    store, here, keys = opened(), pool(3), page_keys(3)
    before = here.kv_buffer.clone()
    store.set([keys[0], keys[2]], flat=[here.get_data_page(0), here.get_data_page(8)])
    assert store.exists(keys) == 1
    assert store.get(keys, pool=here, rows=rows(0, 1, 2)) == [True, False, True]
    assert torch.equal(here.kv_buffer, before)
    store.close()


def test_a_damaged_page_is_a_miss(tmp_path: Path) -> None:
    store, here, keys = opened(on_disk(tmp_path)), pool(4), page_keys(2)
    assert store.set(keys, pool=here, rows=rows(0, 1)) == [True, True]
    store.close()
    (digest,) = [segment.key.digest.hex() for segment in store._segments(keys[:1])]
    (blob,) = tmp_path.rglob(f"0-{digest}")
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    again, target = opened(on_disk(tmp_path)), pool()
    assert again.get(keys, pool=target, rows=rows(0, 1)) == [False, True]
    assert not target.page(0).any() and torch.equal(target.page(4), here.page(4))
    assert again.counts()["not read"] == 1
    again.close()


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "another"}, {"tp_rank": 1, "tp_size": 2}, {"tp_size": 2}, {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2}, {"is_mla_model": True}, {"revision": "abc"}, {"layout": "page_first"},
        {"page_size": 2}, {"dtype": "float16"}, {"salt": "tenant"},
    ],
    ids=str,
)  # fmt: skip
def test_whose_kv_it_is_and_how_it_lies_keep_pages_apart(tmp_path: Path, other: dict[str, Any]) -> None:
    here, keys = pool(5), page_keys(2)
    store = opened(on_disk(tmp_path))
    assert store.set(keys, pool=here, rows=rows(0, 1)) == [True, True]
    store.close()
    spec = dataclasses.replace(SPEC, dtype=other.get("dtype", SPEC.dtype))
    shape = {name: other[name] for name in ("layout", "page_size") if name in other}
    where = pool_of(spec, PAGES, **shape)
    its = storage(**{name: value for name, value in other.items() if hasattr(STORAGE, name)})
    config = on_disk(tmp_path) | ({"salt": other["salt"]} if "salt" in other else {})
    another = opened(config, its, where, revision=other.get("revision", ""))
    assert another.exists(keys) == 0
    another.close()
    again = opened(on_disk(tmp_path))
    assert again.exists(keys) == 2
    again.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings that SGLang says it serves with."""
    said: dict[str, Any] = {"kv_cache_dtype": "auto", "json_model_override_args": "{}", "dtype": "bfloat16"}
    context = types.SimpleNamespace(resolved_server_args_dict=lambda: said)
    module = types.SimpleNamespace(get_context=lambda: context)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", module)  # type: ignore[arg-type]
    return said


def bytes_of(dtype: torch.dtype | None = None) -> HostPool:
    """A pool of KV that SGLang keeps as bytes. dtype: that of the device's pool, if it is known."""
    made = pool_of(dataclasses.replace(SPEC, dtype="uint8"), PAGES)
    if dtype is not None:
        made.device_pool = types.SimpleNamespace(dtype=dtype)  # type: ignore[attr-defined]
    return made


def identity(where: HostPool | None = None) -> dict[str, str | int]:
    return described(STORAGE, where or pool())[1].identity


def test_dtypes_that_are_kept_as_bytes_are_told_apart(server: dict[str, Any]) -> None:
    kinds = (torch.float8_e5m2, torch.float8_e4m3fn)
    found = [identity(bytes_of(dtype)) for dtype in kinds]
    with pytest.raises(ValueError, match=r"^kv_cache_dtype: .*--kv-cache-dtype fp8_e4m3"):
        identity(bytes_of())
    for server["kv_cache_dtype"] in ("fp8_e5m2", "fp8_e4m3"):
        found.append(identity(bytes_of()))
    # Of one dtype, and with other scales.
    for server["kv_cache_dtype"] in ("nvfp4", "fp4_mx_block16"):
        found.append(identity(bytes_of(torch.float8_e4m3fn)))
    assert len({one["kv_dtype"] for one in found}) == len(found)


def test_settings_that_change_kv_keep_pages_apart(server: dict[str, Any], tmp_path: Path) -> None:
    found, scales = [identity()], tmp_path / "scales.json"
    server["context_length"] = None
    assert identity() == found[0]
    for name, value in (
        ("quantization", "fp8"), ("json_model_override_args", '{"rope_theta": 1}'), ("context_length", 8192),
        ("dtype", "float16"), ("mm_process_config", {"image": {"max_pixels": 3136}}), ("model_impl", "transformers"),
    ):  # fmt: skip
        server[name] = value
        found.append(identity())
    server["quantization_param_path"] = str(scales)
    for text in ("one", "two"):
        scales.write_text(text)
        found.append(identity())
    assert all(one != other for n, one in enumerate(found) for other in found[:n])


def test_another_version_of_sglang_has_other_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(number: str) -> dict[str, str | int]:
        monkeypatch.setattr("importlib.metadata.version", lambda name: number)
        return identity()

    assert version("0.5.23") == version("0.5.23") != version("0.5.24")


def test_settings_that_cannot_be_read_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    _warn.cache_clear()
    assert identity() == identity()
    (said,) = [one for one in caplog.records if "revision says so" in one.getMessage()]
    assert "quantization" in said.getMessage()


def test_ranks_with_parts_of_the_kv_share_nothing(tmp_path: Path) -> None:
    here, keys = pool(5), page_keys(2)
    store = opened(on_disk(tmp_path), storage(tp_size=2, tp_rank=0))
    store.set(keys, pool=here, rows=rows(0, 1))
    store.close()
    for rank, count in ((1, 0), (0, 2)):
        other = opened(on_disk(tmp_path), storage(tp_size=2, tp_rank=rank))
        assert other.exists(keys) == count
        other.close()


def test_ranks_with_the_same_kv_share_it(tmp_path: Path) -> None:
    here, keys = pool(5), page_keys(2)
    store = opened(on_disk(tmp_path), storage(is_mla_model=True, tp_size=2))
    store.set(keys, pool=here, rows=rows(0, 1))
    store.close()
    other = opened(on_disk(tmp_path), storage(is_mla_model=True, tp_size=4, tp_rank=3))
    assert other.exists(keys) == 2
    other.close()


def test_keys_of_any_form_are_kept_apart() -> None:
    store, here = opened(), pool(6)
    keys = ["a", "A", "", "é\ud800"[:1], "f" * 64, "F" * 64, "f" * 63]
    assert store.set(keys, pool=here, rows=rows(*range(7))) == [True] * 7
    target = pool()
    assert store.get(keys, pool=target, rows=rows(*range(7))) == [True] * 7
    assert torch.equal(target.kv_buffer[:, :, :28], here.kv_buffer[:, :, :28])
    store.close()


def test_failures_are_counted_misses(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    store, here, keys = opened(), pool(7), page_keys(2)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert store.set(keys, pool=here, rows=rows(0)) == [False, False]
            assert store.get(keys, pool=here, rows=rows(0, 99)) == [False, False]
            assert store.get(keys, pool=here, rows=torch.tensor([0, 6])) == [False, False]
            assert store.get(keys, pool=object(), rows=rows(0, 1)) == [False, False]
            assert store.set(keys, flat=[torch.zeros(3)] * 2) == [False, False]
    assert store.counts() == {"failed": 15, "not written": 12, "not read": 18, "written": 0, "read": 0}
    assert len(caplog.records) == 5  # each once
    store.close()
    assert store.exists(keys) == 0 and store.get(keys, pool=here, rows=rows(0, 1)) == [False, False]
    assert store.clear() is False


def test_what_a_tier_does_not_take_is_not_said_to_be_kept() -> None:
    """Pages for which there is no room, since all of memory is pages just as recent, are told apart from kept ones."""
    store, here = opened({"tiers": [{"type": "memory", "capacity": "4KiB"}]}), pool(8)
    keys = page_keys(PAGES)
    kept = store.set(keys, pool=here, rows=rows(*range(PAGES)))
    assert not all(kept)
    assert store.get(keys, pool=pool(), rows=rows(*range(PAGES))) == kept
    store.close()


def test_clearing_forgets_all_of_the_model(tmp_path: Path) -> None:
    here, keys = pool(9), page_keys(4)
    store, other = opened(on_disk(tmp_path / "a")), opened(on_disk(tmp_path / "a"), storage(model_name="other"))
    for each in (store, other):
        each.set(keys, pool=here, rows=rows(*range(4)))
    assert store.clear() is True
    assert store.exists(keys) == 0 and other.exists(keys) == 4
    store.close()
    other.close()


def test_many_threads_at_once(tmp_path: Path) -> None:
    config = {"tiers": [{"type": "memory", "capacity": "1MiB"}, {"type": "disk", "path": str(tmp_path)}]}
    store, here = opened(config), pool(10)
    wrong: list[int] = []

    def work(number: int) -> None:
        target = pool()
        for turn in range(5):
            keys = page_keys(4, f"{(number + turn) % 3}/")
            first = 4 * ((number + turn) % 3)
            there = rows(*range(first, first + 4))
            store.set(keys, pool=here, rows=there)
            moved = store.get(keys, pool=target, rows=there)
            same = [torch.equal(target.page(int(row)), here.page(int(row))) for row in there]
            wrong.extend([number] if moved != [True] * 4 or not all(same) else [])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    store.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"connector": "transformers"}, "^connector: 'transformers' does not read SGLang's memory"),
        ({"tokens": "radix"}, "^tokens: SGLang's own hashes name the pages"),
    ],
)
def test_what_would_have_no_effect_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(config)


def test_the_connector_alone_has_nothing_to_read() -> None:
    with pytest.raises(ValueError, match="is opened by SGLang"):
        SGLangConnector(SGLangConnector.Config(), SPEC)


def test_pools_and_models_that_cannot_be_kept_are_named() -> None:
    class Split(HostPool):
        def get_dummy_flat_data_page(self) -> torch.Tensor:
            raise ValueError("split")

    with pytest.raises(ValueError, match=r"Split of layout layer_first does not hand out whole pages \(split\)"):
        described(STORAGE, pool_of(SPEC, 1, kind=Split))
    with pytest.raises(ValueError, match="which model it serves"):
        described(storage(model_name=None), pool())


def test_the_example_is_a_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = opened(Path(__file__).parents[1] / "examples/sglang.yaml")
    assert store.set(page_keys(1), pool=pool(11), rows=rows(0)) == [True]
    store.close()
    assert len(list(tmp_path.rglob("0-*"))) == 1


def test_a_call_takes_its_timeout_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(timeout=10.0)
    now, waited = [100.0], []

    def save(segments: Any, **where: Any) -> Any:
        now[0] += 8
        return types.SimpleNamespace(result=lambda timeout: None)

    def find(segments: Any, *, timeout: float) -> torch.Tensor:
        waited.append(timeout)
        return torch.zeros(len(segments), dtype=torch.bool)

    def flush(seconds: float) -> bool:
        waited.append(seconds)
        return False

    monkeypatch.setattr(page_store.time, "monotonic", lambda: now[0])
    engine = types.SimpleNamespace(save=save, flush=flush, find=find)
    monkeypatch.setattr(store, "_engine", engine)
    assert store.set(page_keys(2)) == [False, False] and waited == [2.0, 2.0]
    monkeypatch.undo()
    store.close()


def test_a_question_ends_by_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with skipping_clock() as clock:
        hang = Hang(clock)
        monkeypatch.setattr(DiskBackend, "contains", lambda backend, key: hang("contains", key))
        config = {"tiers": [{"type": "disk", "path": str(tmp_path), "deadline": "200s"}]}
        store = opened(config, timeout=10.0)
        assert store.exists(page_keys(2)) == 0
        assert hang.waiting == 1 and store.counts() == {}
        assert not [key for key in store.engine.counters() if key.name == "tier_error"], "the tier had time left"
        hang.open()
        store.close()


def test_what_was_said_is_remembered_up_to_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    store = opened()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for number in range(3 * page_store._MOST_WARNINGS):
            store.miss(1, f"{number}: " + "x" * 10_000)
    assert len(caplog.records) == len(store._warned) == page_store._MOST_WARNINGS
    assert max(map(len, store._warned)) < 1000
    store.close()
