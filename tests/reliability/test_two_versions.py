"""Two versions of kvloom on one store: what the other wrote is a plain miss, and stays.

What a process cannot read it neither judges nor replaces: it is served, and kept, by those who can. It counts towards
the capacity like everything else, so that the tier's bound holds: then the least recently used goes, whoever wrote it.
An operator's `remove` and `clear` delete it too, because a tenant who asks to be forgotten means all of it.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
import xxhash
from reliability_children import PROMPTS, later_version, open_on, processes, prompt
from reliability_support import audit, events, eventually, forget_memory, ledger_bytes, retrieved

from kvloom import Engine, envelope
from kvloom_backend_disk.backend import DiskBackend

ROOMY, TIGHT = "1GiB", "10MiB"


def of_later_version(blob: bytes) -> bytes:
    """The same blob as a version to come would sign it: where sizes and checksum lie is the same in every version."""
    data = bytearray(blob)
    struct.pack_into("<H", data, 8, envelope.VERSION + 1)
    size = struct.unpack_from("<I", data, 12)[0]
    data[40:56] = bytes(16)
    data[40:56] = xxhash.xxh3_128_digest(data[:size])
    return bytes(data)


def versions(path: Path) -> dict[str, int]:
    """The version of every blob file."""
    files = [file for file in path.glob("*/*/+??/*") if file.is_file()]
    return {str(file): struct.unpack_from("<H", file.read_bytes()[:16], 8)[0] for file in files}


def age(path: Path, prompts: range, capacity: str | None) -> dict[str, bytes]:
    """Store `prompts` as a version to come would have: key to blob."""
    store = DiskBackend(DiskBackend.Config(path=path))
    theirs = {}
    with open_on(str(path), capacity) as engine:
        for tokens, kv in map(prompt, prompts):
            engine.store(tokens, kv=kv)
            assert engine.flush()
            for segment in engine.segments(tokens):
                blob = of_later_version(bytes(store.get(str(segment.key)) or b""))
                store.put(str(segment.key), [blob])
                theirs[str(segment.key)] = blob
    return theirs


def use(engine: Engine, prompts: range) -> None:
    """Everything that serving does with these prompts, which only another version's blobs hold."""
    for tokens, kv in map(prompt, prompts):
        engine.lookup(tokens)
        assert retrieved(engine, tokens, kv) == 0, "a plain miss"
        assert not engine.prefetch(tokens).result().any()
        assert engine.pin(tokens) == 0
        engine.store(tokens, kv=kv)
        assert engine.flush()
        assert retrieved(engine, tokens, kv) == len(tokens), "memory serves it meanwhile"
        assert retrieved(engine, tokens, kv, mask=torch.ones(len(tokens), dtype=torch.bool)) == len(tokens)
    assert events(engine, "corrupt") == events(engine, "tier_error") == 0


@pytest.mark.parametrize("capacity", [None, ROOMY], ids=["unbounded", "bounded"])
def test_what_a_later_version_wrote_is_a_miss_and_stays(tmp_path: Path, capacity: str | None) -> None:
    prompts = range(8)
    theirs = age(tmp_path, prompts, capacity)
    store = DiskBackend(DiskBackend.Config(path=tmp_path))
    for _ in range(2):  # the second time after a restart
        with open_on(str(tmp_path), capacity) as engine:
            use(engine, prompts)
            tokens, kv = prompt(11)
            engine.store(tokens, kv=kv)
            assert engine.flush()
            forget_memory(engine)
            assert retrieved(engine, tokens, kv) == len(tokens), "the tier works for what is of this version"
        for key, blob in theirs.items():
            assert bytes(store.get(key) or b"") == blob, "neither deleted nor replaced"


def test_capacity_holds_over_both_versions(tmp_path: Path) -> None:
    theirs = age(tmp_path, range(16), TIGHT)
    store = DiskBackend(DiskBackend.Config(path=tmp_path))
    with open_on(str(tmp_path), TIGHT) as engine:
        eventually(lambda: engine.health().tiers[1].recovered, "the listing of the store")
        for tokens, kv in map(prompt, range(30, 50)):
            engine.store(tokens, kv=kv)
            assert engine.flush()
            found = audit(tmp_path)
            assert ledger_bytes(engine) == found.bytes <= 10 << 20 and not found.broken
        assert found.unreadable < len(theirs), "what nobody uses made room"
        left = [key for key in theirs if store.contains(key)]
        assert all(bytes(store.get(key) or b"") == theirs[key] for key in left)


@pytest.mark.parametrize("verb", ["remove", "clear"])
def test_an_operator_deletes_what_any_version_wrote(tmp_path: Path, verb: str) -> None:
    theirs = age(tmp_path, range(4), ROOMY)
    with open_on(str(tmp_path), ROOMY) as engine:
        for tokens, _ in map(prompt, range(4)):
            engine.remove(tokens) if verb == "remove" else engine.clear()
    store = DiskBackend(DiskBackend.Config(path=tmp_path))
    assert not any(store.contains(key) for key in theirs)


@pytest.mark.parametrize("capacity", [None, ROOMY], ids=["unbounded", "bounded"])
def test_processes_of_two_versions_share_a_store_in_peace(tmp_path: Path, capacity: str | None) -> None:
    mine, theirs = processes.Pipe()
    child = processes.Process(target=later_version, args=(str(tmp_path), capacity, theirs), daemon=True)
    child.start()

    def other(verb: str, seed: int) -> int | bool:
        mine.send((verb, seed))
        assert mine.poll(60)
        return mine.recv()  # type: ignore[no-any-return]

    with open_on(str(tmp_path), capacity) as engine:
        there: dict[str, int] = {}
        for turn in range(24):
            tokens, kv = prompt(turn)
            if turn % 3 == 0:  # the other version has it first
                assert other("store", turn)
                assert retrieved(engine, tokens, kv) == 0
                engine.store(tokens, kv=kv)
                assert engine.flush()
            elif turn % 3 == 1:  # this one does, and the other can read it
                engine.store(tokens, kv=kv)
                assert engine.flush()
                assert other("retrieve", turn) == len(tokens)
                assert other("store", turn)
            else:
                assert other("store", turn)
            now = versions(tmp_path)
            assert there.items() <= now.items(), "neither deletes or replaces the other's"
            there = now
            assert other("retrieve", turn) == len(tokens)
        assert set(there.values()) == {envelope.PLAIN_VERSION, envelope.VERSION + 1}
    mine.send(None)
    child.join(60)
    assert child.exitcode == 0 and PROMPTS == 24
