"""Keys to files and back."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import IncompleteListingError
from kvloom_backend_disk.layout import Layout

CHUNK = f"{'0a' * 16}/-/7-{'3f' * 32}"

parts = st.one_of(
    st.sampled_from(["a", "b", "ab", "a.b", ".a", "...", "-", "_", "0-ff", "A1"]),
    st.text("ab.-_0", min_size=1, max_size=4),
).filter(lambda part: part not in (".", ".."))
keys = st.lists(parts, min_size=1, max_size=4).map("/".join)


def names(entries: Any) -> list[str]:
    return sorted(entry.key for entry in entries)


@given(st.sets(keys, max_size=15), st.lists(st.one_of(keys, st.text("ab./-0+", max_size=5)), max_size=6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_scan_gives_back_exactly_the_keys_with_the_prefix(
    tmp_path: Path, open_backend: Any, present: set[str], prefixes: list[str]
) -> None:
    shutil.rmtree(tmp_path)
    backend = open_backend(tmp_path)
    for key in present:
        backend.put(key, [key.encode()])
    for prefix in ["", *prefixes, *(key[:-1] for key in present), *present]:
        assert names(backend.scan(prefix)) == sorted(key for key in present if key.startswith(prefix)), prefix
    for key in present:
        assert backend.get(key) == key.encode()
    some = sorted(present)[::2]
    backend.delete_many(some)
    assert names(backend.scan()) == sorted(present - set(some))
    assert backend.contains_many(sorted(present)) == [key not in some for key in sorted(present)]


def test_entries_tell_what_is_on_the_disk_and_since_when(tmp_path: Path, open_backend: Any) -> None:
    backend = open_backend(tmp_path)
    start = time.time()
    backend.put(CHUNK, [bytes(range(256)) * 40])
    (entry,) = backend.scan()
    assert entry.key == CHUNK
    (file,) = (path for path in tmp_path.rglob("*-*") if path.is_file())
    assert entry.bytes == 512 * file.stat().st_blocks
    assert start - 60 <= entry.modified <= time.time() + 60


def test_chunks_are_spread_by_their_digest(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    for digest in ("00" + "ab" * 31, "c7" + "ab" * 31):
        assert layout.path(f"fp/salt/12-{digest}") == f"{tmp_path}/fp/salt/+{digest[:2]}/12-{digest}"
    others = {os.path.dirname(layout.path(f"spec/{i}.json")) for i in range(5000)}
    assert len(others) == 256


@pytest.mark.parametrize(
    "key",
    ["", "/", "/etc/passwd", "a//b", "a/", "/a", "..", "../a", "a/../b", "a/..", ".", "./a", "a/./b", "a b", "a\0b",
     "a\n", "a+b", "+tmp/x", "a\\b", "ä", "x" * 201, "~/a"],
)  # fmt: skip
def test_what_is_no_key_reaches_no_file(tmp_path: Path, open_backend: Any, target: Any, key: str) -> None:
    backend = open_backend(tmp_path / "store")
    for call in (
        lambda: backend.put(key, [b"x"]),
        lambda: backend.get(key),
        lambda: backend.get_into(key, target()),
        lambda: backend.get_range(key, 0, memoryview(bytearray(1))),
        lambda: backend.contains(key),
        lambda: backend.delete(key),
        lambda: backend.delete_many([key]),
    ):
        with pytest.raises(ValueError, match="not a key"):
            call()
    assert os.listdir(tmp_path) == ["store"]


def test_a_scan_does_not_leave_the_directory(tmp_path: Path, open_backend: Any) -> None:
    open_backend(tmp_path / "other").put("a", [b"x"])
    backend = open_backend(tmp_path / "store")
    for prefix in ("../other/", "../", "/", f"{tmp_path}/other/"):
        assert list(backend.scan(prefix)) == []


def test_files_that_are_not_ours_are_no_blobs(tmp_path: Path, open_backend: Any) -> None:
    backend = open_backend(tmp_path)
    backend.put(CHUNK, [b"x"])
    (blob,) = (path for path in tmp_path.rglob("*-*") if path.is_file())
    shard = blob.parent
    elsewhere = [f"{shard.parent}/+40/{blob.name}", f"{shard.parent}/+3f+/{blob.name}"]
    long = f"{shard}/9{'9' * 100}-{'3f' * 32}"
    for foreign in ("README", "+tmp/x", f"{shard}/.nfs0001", f"{shard}/a b", f"{shard.parent}/lost", *elsewhere, long):
        (tmp_path / foreign).parent.mkdir(exist_ok=True)
        (tmp_path / foreign).write_bytes(b"foreign")
    assert names(backend.scan()) == [CHUNK]


def test_nothing_there(tmp_path: Path, open_backend: Any, target: Any) -> None:
    backend = open_backend(tmp_path)
    assert backend.get(CHUNK) is None
    assert not backend.get_into(CHUNK, target())
    assert not backend.get_range(CHUNK, 0, memoryview(bytearray(1)))
    assert not backend.contains(CHUNK)
    backend.delete(CHUNK)
    backend.delete_many([CHUNK, CHUNK])
    assert list(backend.scan()) == []


def test_the_directory_may_vanish_at_any_time(tmp_path: Path, open_backend: Any) -> None:
    backend = open_backend(tmp_path / "store")
    backend.put(CHUNK, [b"1"])
    shutil.rmtree(tmp_path / "store")
    assert backend.get(CHUNK) is None and list(backend.scan()) == []
    backend.put(CHUNK, [b"2"])
    assert backend.get(CHUNK) == b"2"


def test_deleting_everything_leaves_no_directories(tmp_path: Path, open_backend: Any) -> None:
    backend = open_backend(tmp_path)
    keys = [f"fp/s{i % 3}/{i}-{i % 256:02x}{'00' * 31}" for i in range(60)] + ["spec/fp.json"]
    for key in keys:
        backend.put(key, [b"x"])
    backend.delete_many(keys[:-1])
    assert names(backend.scan()) == ["spec/fp.json"]
    assert sorted(os.listdir(tmp_path)) == ["+tmp", "spec"]
    backend.put(keys[0], [b"y"])
    assert backend.get(keys[0]) == b"y"


def test_a_listing_goes_past_what_holds_no_blobs(tmp_path: Path, open_backend: Any) -> None:
    """A link in a loop, a link that leads back, and a directory in which no key lies."""
    backend = open_backend(tmp_path)
    backend.put(CHUNK, [b"blob"])
    (tmp_path / "itself").symlink_to("itself")
    (tmp_path / "here").symlink_to(".")
    (tmp_path / "root").symlink_to("/")
    (tmp_path / "lost+found").mkdir(0o000)
    (tmp_path / "lost+found").rmdir()
    (tmp_path / "lost+found").symlink_to("/proc/self/fd")  # would be read, were it looked at
    assert names(backend.scan()) == [CHUNK]


def test_a_link_that_may_not_be_read_ends_no_listing(
    tmp_path: Path, open_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one through another process's directory in /proc."""
    backend = open_backend(tmp_path)
    backend.put(CHUNK, [b"blob"])
    (tmp_path / "shut").symlink_to("elsewhere")

    def denied(path: str, *, dir_fd: int | None = None) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "readlink", denied)
    found = []
    with pytest.raises(IncompleteListingError, match="shut"):
        found.extend(backend.scan())
    assert names(found) == [CHUNK]


@pytest.mark.parametrize("where", ["abc", f"{'0a' * 16}/x", f"{'0a' * 16}/-/+3e"])
def test_a_listing_goes_past_what_it_cannot_read_and_says_so(
    tmp_path: Path, open_backend: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    backend = open_backend(tmp_path)
    backend.put(CHUNK, [b"blob"])
    (tmp_path / where).mkdir()
    scandir = os.scandir

    def denied(path: str) -> Any:
        if path.rstrip("/") == str(tmp_path / where):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    found = []
    with pytest.raises(IncompleteListingError, match=re.escape(f"{where} (Permission denied)")):
        found.extend(backend.scan())
    assert names(found) == [CHUNK]
