"""Files with holes in the place of a small record take no memory, however long they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from core_support import SPEC, kv_of, tokens_of

from kvloom import ConfigError, CorruptBlobError, Engine, EngineConfig, Sink
from kvloom.bounded import get_at_most, one_line
from kvloom.builtin.dict_backend import DictBackend
from kvloom.contracts.component import Config
from kvloom.format.encryption import Protection
from kvloom.tiers.index.eviction_history import RECORD, parse

HOLE_BYTES = 1 << 43
"""More than there is memory."""


def hollow(file: Path, nbytes: int = HOLE_BYTES) -> None:
    os.truncate(file, 0)
    os.truncate(file, nbytes)


def test_a_read_with_a_bound_refuses_what_is_longer_before_it_is_read() -> None:
    read = []

    class Large(DictBackend):
        def get_into(self, key: str, sink: Sink) -> bool:
            sink.reserve(1 << 60)
            read.append(key)
            return True

    with pytest.raises(CorruptBlobError, match="at most 10"):
        get_at_most(Large(Config()), "key", 10)
    assert not read
    small = DictBackend(Config())
    assert get_at_most(small, "key", 10) is None
    small.put("key", [b"0123456789"])
    assert get_at_most(small, "key", 10) == b"0123456789"
    small.put("key", [b"0123456789a"])
    with pytest.raises(CorruptBlobError):
        get_at_most(small, "key", 10)


def test_what_others_wrote_is_one_short_line_in_a_log() -> None:
    assert one_line("a\nb\x1b[2J\u202e") == r"a\nb\x1b[2J\u202e"
    assert len(one_line("\U0001f600" * 9_000)) < 5_000 and one_line("x" * 300) == "x" * 300


@pytest.mark.parametrize("kind", ["hollow", "directory"])
def test_an_engine_writes_over_what_lies_where_its_record_belongs(tmp_path: Path, kind: str) -> None:
    tiers = [{"type": "memory", "capacity": "1MiB"}, {"type": "disk", "path": str(tmp_path), "capacity": "16KiB"}]
    settings = {"chunk_tokens": 4, "connector": "plain", "tiers": tiers}
    with Engine.open(settings, SPEC) as engine:
        engine.store(tokens_of(16), kv=kv_of(16))
    (file,) = tmp_path.glob("spec/+*/evicted")
    file.unlink()
    file.touch() if kind == "hollow" else file.mkdir()
    if kind == "hollow":
        hollow(file)
    with Engine.open(settings, SPEC) as engine:
        engine.store(tokens_of(16, seed=1), kv=kv_of(16))
        backend = engine._stack.stored[0].backend
    closed = "upkeep: BackendError"  # while it was still listing
    assert {key.reason for key in engine.counters() if key.name == "tier_error"} <= {closed}
    record = backend.get(RECORD)
    assert record is not None and parse(bytes(record)) is not None


@pytest.mark.parametrize("kind", ["device", "holes"])
def test_a_file_that_never_ends_is_refused_where_one_is_named(tmp_path: Path, kind: str) -> None:
    endless = Path("/dev/zero")
    if kind == "holes":
        (endless := tmp_path / "holes").touch()
        hollow(endless)
    with pytest.raises(ConfigError, match="cannot be read: it has more than"):
        EngineConfig.from_file(endless)
    why = "it has more than" if kind == "holes" else "not a regular file"
    with pytest.raises(ConfigError, match=rf"cannot read .*: {why}"):
        Protection.load("sign", str(endless))
