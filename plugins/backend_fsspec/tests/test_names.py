"""Keys and objects: every key has a name of its own, inside the prefix, and no other object is taken for a blob."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_backend_fsspec import backend as backend_module
from kvloom_backend_fsspec.backend import FsspecBackend
from kvloom_backend_fsspec.names import Names

PARTS = st.from_regex(r"[A-Za-z0-9._-]{1,12}", fullmatch=True).filter(lambda part: part not in (".", ".."))
KEYS = st.lists(PARTS, min_size=1, max_size=5).map("/".join)


@given(KEYS, st.sampled_from(["", "kv", "a b/c=kv/d"]))
def test_a_name_leads_back_to_its_key(key: str, prefix: str) -> None:
    names = Names(prefix)
    name = names.blob(key)
    assert names.key(name) == key
    assert name.startswith(prefix) and ".." not in name.split("/")


@given(KEYS, KEYS)
def test_no_blob_is_where_another_needs_a_directory(one: str, other: str) -> None:
    names = Names("kv")
    if one != other:
        assert names.blob(one) != names.blob(other)
    with pytest.raises(ValueError, match="not a key"):
        Names("").blob(Names("").blob(one))  # what is above a blob is the beginning of a key


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", ".", "a/../b", "a b", "a=kv", "ä", "a\n", "x" * 201])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="not a key"):
        Names("kv").blob(key)


@pytest.mark.parametrize(
    "name",
    ["kv/a", "kv/a=kv2", "other/a=kv", "kv/a b=kv", "kv/=hold/a=kv", "kv/../a=kv", "kv/=kv", f"kv/{'x' * 201}=kv"],
)
def test_other_objects_are_no_blobs(name: str) -> None:
    assert Names("kv").key(name) is None


def test_what_is_ones_own_is_no_blob() -> None:
    names = Names("kv")
    assert [names.key(name) for name in (names.draft(), names.probe(), names.right("evict"))] == [None] * 3


@pytest.mark.parametrize("driver", ["obstore", "fsspec"])
def test_objects_of_others_are_left_alone(tmp_path: Path, driver: str) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "notes.txt").write_text("mine")
    backend = FsspecBackend(FsspecBackend.Config(url=f"file://{tmp_path}/kv", driver=driver))
    backend.put("a/b", [b"blob"])
    assert [entry.key for entry in backend.scan()] == ["a/b"]
    backend.delete_many(["a/b", "notes.txt"])
    assert (tmp_path / "kv" / "notes.txt").read_text() == "mine"


def test_files_of_blobs_that_are_as_large_as_a_part_and_more(tmp_path: Path) -> None:
    backend = FsspecBackend(FsspecBackend.Config(url=f"file://{tmp_path}/kv"))
    for size in (8 << 20, (8 << 20) + 1, (24 << 20) - 7, 5):
        blob = os.urandom(size)
        for _ in range(2):  # how it is read depends on the size of what was read before
            backend.put("a", [blob])
            assert backend.get("a") == blob
    assert not [path for path in tmp_path.rglob("*") if re.search("=tmp|#", path.name)]


@pytest.mark.parametrize("driver", ["obstore", "fsspec"])
def test_what_a_killed_process_was_writing_is_removed_after_a_day(tmp_path: Path, driver: str) -> None:
    names = Names(str(tmp_path / "kv").lstrip("/"))
    backend = FsspecBackend(FsspecBackend.Config(url=f"file://{tmp_path}/kv", driver=driver))
    backend.put("a/b", [b"blob"])
    left = [
        Path("/", name) for name in (names.draft(), names.probe(), f"{names.blob('a/b')}#1", f"{names.blob('c')}#12")
    ]
    others = [tmp_path / "kv" / name for name in ("notes#1", "a/b=kv#x", "=tmp/notes", "a/=kv#1")]
    for path in (*left, *others):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
        os.utime(path, (time.time() - 80_000,) * 2)
    assert [entry.key for entry in backend.scan()] == ["a/b"]
    assert all(path.exists() for path in left), "it may still be written"
    for path in (*left, *others):
        os.utime(path, (time.time() - 90_000,) * 2)
    assert [entry.key for entry in backend.scan()] == ["a/b"]
    assert not any(path.exists() for path in left) and all(path.exists() for path in others)


def test_a_draft_that_has_not_changed_for_ten_minutes_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(backend_module, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    backend = FsspecBackend(FsspecBackend.Config(url=f"file://{tmp_path}/kv"))
    backend.put("a", [b"blob"])
    still, written = (tmp_path / "kv" / f"a=kv#{number}" for number in (1, 2))
    for step in range(7):
        written.write_bytes(b"x" * (step + 1))
        if not step:
            still.write_bytes(b"x")
        assert still.exists()
        list(backend.scan())
        now[0] += 100.0
    assert written.exists() and not still.exists() and backend.get("a") == b"blob"
