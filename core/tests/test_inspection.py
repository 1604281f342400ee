"""`kvloom.inspection`: stored tiers as a tool sees them, beside an engine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from pathlib import Path

import pytest
from core_support import CHUNK, SPEC, eventually, kv_of, tokens_of

import kvloom
from kvloom import BackendError, ConfigError, Engine, EngineConfig, check_config, inspection


@pytest.fixture
def resolved(tmp_path: Path) -> inspection.Resolved:
    tiers = [{"type": "memory", "capacity": "1MiB"}, {"type": "disk", "path": str(tmp_path), "capacity": "64KiB"}]
    return check_config(EngineConfig.load({"chunk_tokens": CHUNK, "connector": "plain", "tiers": tiers}))


def fill(path: Path, chunks: int) -> str:
    """Store chunks in the directory; return the engine's fingerprint."""
    tier = {"type": "disk", "path": str(path), "capacity": "64KiB"}
    settings = {"chunk_tokens": CHUNK, "connector": "plain", "tiers": [tier]}
    with Engine.open(settings, SPEC) as engine:
        engine.store(tokens_of(chunks * CHUNK), kv=kv_of(chunks * CHUNK))
        assert engine.flush(30)
        return engine.fingerprint


def test_blobs_headers_records_and_evictions(resolved: inspection.Resolved, tmp_path: Path) -> None:
    fingerprint = fill(tmp_path, 2)
    with inspection.opened(*inspection.stored(resolved), made=False) as store:
        keys = [str(key) for key, entry in store.blobs() if entry.bytes]
        assert len(keys) == 2 and all(key.startswith(f"{fingerprint}/-/") for key in keys)
        header = store.ask(lambda: store.header(keys[0]))
        assert header is not None and header.description.num_tokens == CHUNK
        assert store.header(f"{keys[0][:-2]}00") is None
        ((name, record),) = store.records().items()
        assert name == fingerprint and record["spec"]["model"] == SPEC.model
        connector = resolved.connector.make(SPEC)
        about = (SPEC, connector.format, connector.representation)
        assert record["identity"] == json.loads(json.dumps(inspection.identity(*about)))
        assert name == kvloom.fingerprint(*about)
        history = store.evictions()
        assert history is not None and not history.rows
        calls = [(key, lambda key=key: store.header(key)) for key in keys]
        found = list(inspection.at_once(calls, seconds=10, threads=2))
        assert [key for key, _ in found] == keys and not any(isinstance(one, Exception) for _, one in found)


def test_of_many_or_long_records_some_are_left_out_and_counted(resolved: inspection.Resolved, tmp_path: Path) -> None:
    """Anybody who may write to a store may put records there, and JSON takes much more memory than text."""
    fingerprint = fill(tmp_path, 1)
    made = json.dumps({"identity": {}, "spec": {}, "more": [[]] * 15_000}).encode()
    with inspection.opened(*inspection.stored(resolved)) as store:
        store.backend.put("spec/odd.json", [made])
        store.backend.put(f"spec/{'ab' * 16}.json", [made + b" " * 30_000])
        records = store.records()
        assert set(records) == {fingerprint} and records.left_out == 1
        for number in range(100):
            store.backend.put(f"spec/{number:032x}.json", [made])
        records = store.records()
        assert len(records) + records.left_out == 102 and len(records) * len(made) < 5 << 20
        assert all(set(record) == {"identity", "spec"} for record in records.values())
        for number in range(1100):
            store.backend.put(f"spec/{number:032x}.json", [b'{"identity": {}, "spec": {}}'])
        records = store.records()
        assert len(records) <= 1024 and len(records) + records.left_out == 1102


def test_errors_name_the_tier(resolved: inspection.Resolved, tmp_path: Path) -> None:
    (choice,) = inspection.stored(resolved)
    with inspection.opened(choice) as store, pytest.raises(BackendError, match="tier disk: ZeroDivisionError"):
        store.ask(lambda: 1 // 0)
    with pytest.raises(ConfigError, match="no stored tier is called 'ram'; there are: disk"):
        inspection.stored(resolved, "ram")
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    with pytest.raises(ConfigError, match="nothing was stored there yet"), inspection.opened(choice, made=False):
        pass


def test_what_a_blob_takes_of_a_tier() -> None:
    assert [inspection.stored_bytes(nbytes) for nbytes in (1, 4096, 4097)] == [4096, 4096, 8192]
    assert inspection.pool_bytes(1, 1 << 30) == 4096


@pytest.mark.parametrize("fails", [False, True])
def test_no_thread_outlives_a_store(
    resolved: inspection.Resolved, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = dataclasses.replace(inspection.stored(resolved)[0], name="gone-afterwards")
    if fails:
        monkeypatch.setattr("kvloom_backend_disk.backend.DiskBackend.__init__", lambda *given: 1 // 0)
    with contextlib.suppress(ConfigError, ZeroDivisionError), inspection.opened(tier) as store:
        store.ask(lambda: None)
    assert eventually(lambda: not [one for one in threading.enumerate() if "gone-afterwards" in one.name])
