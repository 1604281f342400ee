"""Whatever a blob's buffers are and whichever way it takes, the same bytes come back."""

from __future__ import annotations

import mmap
import os
import random
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvloom import BackendError, native
from kvloom_backend_disk import pagecache, transfer, window
from kvloom_backend_disk.extents import coalesce

POOL_BYTES = 4 << 20
POOL = memoryview(mmap.mmap(-1, POOL_BYTES))
POOL[:] = random.Random(0).randbytes(POOL_BYTES)
KEY = f"{'0a' * 16}/-/7-{'3f' * 32}"

lengths = st.one_of(
    st.sampled_from([0, 1, 4095, 4096, 4097, 8192, 65536, 131072, 1 << 20, (1 << 20) + 4096]),
    st.integers(0, 300_000),
)
TO_NEXT_PAGE = -1
gaps = st.one_of(st.just(0), st.just(0), st.sampled_from([4096, TO_NEXT_PAGE, 1, 64, 4095]))
buffers = st.lists(st.tuples(gaps, lengths, st.sampled_from(["view", "readonly", "bytes", "bytearray"])), max_size=12)
pytestmark = pytest.mark.usefixtures("way")

every = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def build(plan: list[tuple[int, int, str]]) -> list[Any]:
    """Buffers cut from the pool, one behind the other but for the gaps."""
    at, blob = 0, []
    kinds = {
        "view": lambda part: part,
        "readonly": lambda part: part.toreadonly(),
        "bytes": bytes,
        "bytearray": bytearray,
    }
    for gap, length, kind in plan:
        at += -at % 4096 if gap == TO_NEXT_PAGE else gap
        at %= POOL_BYTES
        part = POOL[at : at + length]
        blob.append(kinds[kind](part))
        at += len(part)
    return blob


@pytest.mark.parametrize("direct", ["auto", "always", "never"])
@given(plan=buffers, shift=st.sampled_from([0, 0, 1, 4096]), cut=st.tuples(lengths, lengths), cold=st.booleans())
@example(plan=[(0, 4096, "view"), *[(0, 65536, "view")] * 8], shift=0, cut=(4096, 131072), cold=True)
@example(plan=[(0, 4096, "bytes"), *[(0, 33333, "view")] * 11], shift=0, cut=(1, 200000), cold=True)
@example(plan=[(0, 5000, "view"), (TO_NEXT_PAGE, 150_000, "view")], shift=0, cut=(0, 4096), cold=False)
@every
def test_round_trip(
    direct_path: Path, monkeypatch: Any, open_backend: Any, target: Any, drop_from_cache: Any,
    direct: str, plan: Any, shift: int, cut: tuple[int, int], cold: bool,
) -> None:  # fmt: skip
    backend = open_backend(direct_path, direct)
    blob = build(plan)
    expected = b"".join(blob)
    backend.put(KEY, blob)
    if cold:
        drop_from_cache(direct_path)
    assert backend.get(KEY) == expected

    if cold:
        drop_from_cache(direct_path)
    sink = target(expected, shift)
    assert backend.get_into(KEY, sink)
    assert sink.view == expected
    assert sink.steps == sorted(set(sink.steps)) and (sink.steps or [0])[-1] == len(expected)
    assert all(b - a <= transfer.DIRECT_STEP_BYTES for a, b in zip([0, *sink.steps], sink.steps, strict=False))

    offset, length = cut
    into = memoryview(mmap.mmap(-1, length + shift + 1))[shift : shift + length]
    fits = offset + length <= len(expected)
    assert backend.get_range(KEY, offset, into) is fits
    if fits:
        assert into == expected[offset : offset + length]


def test_more_buffers_than_one_system_call_takes(direct_path: Path, open_backend: Any) -> None:
    blob = [POOL[at : at + 3] for at in range(0, 40_000, 4)]
    for direct in ("always", "never"):
        backend = open_backend(direct_path, direct)
        backend.put(KEY, blob)
        assert backend.get(KEY) == b"".join(blob)


def test_a_kernel_that_moves_less_than_asked(tmp_path: Path, open_backend: Any, monkeypatch: Any) -> None:
    writev, readv = os.writev, os.readv
    monkeypatch.setattr(os, "writev", lambda fd, views: writev(fd, [b"".join(views)[:900]]))
    monkeypatch.setattr(os, "readv", lambda fd, views: readv(fd, [views[0][:999]]))
    backend = open_backend(tmp_path, "never")
    blob = [POOL[:2000], POOL[5000:5700], POOL[9000:9003], POOL[9100:9103]]
    backend.put(KEY, blob)
    assert backend.get(KEY) == b"".join(blob)


def test_buffers_of_any_item_type(tmp_path: Path, open_backend: Any) -> None:
    backend = open_backend(tmp_path)
    words = memoryview(bytes(range(240))).cast("I", [6, 10])
    backend.put(KEY, [words, memoryview(b"").cast("I"), b"end"])
    assert backend.get(KEY) == bytes(range(240)) + b"end"


def test_touching_buffers_become_one() -> None:
    parts = [POOL[0:100], POOL[100:5000], POOL[5000:5001].toreadonly(), POOL[6000:6001]]
    runs = coalesce(parts)
    assert [len(run.view) for run in runs] == [5001, 1]
    assert runs[0].address == native.pointer(POOL)
    assert runs[0].view == POOL[:5001]


def cached(path: Path) -> bool:
    """Return whether the page cache holds the middle of the only blob."""
    (file,) = (path for path in path.rglob("*-*") if path.is_file())
    fd = os.open(file, os.O_RDONLY)
    try:
        return pagecache.is_cached(fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)


@pytest.fixture
def windowless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system where writes cannot be followed to the disk."""
    monkeypatch.setattr(window, "works", lambda fd: False)


def kernel_tells_what_is_cached() -> bool:
    with tempfile.NamedTemporaryFile(dir=Path(__file__).parent) as file:
        file.write(bytes(65536))
        file.flush()
        return pagecache.is_cached(file.fileno(), 0, 65536)


@pytest.mark.skipif(
    not kernel_tells_what_is_cached(), reason="this kernel does not tell what is cached (Linux 6.5 does)"
)
class TestWhichWay:
    BLOB = (POOL[:4096], POOL[4096 : 2 << 20])

    @pytest.mark.parametrize(("direct", "expected"), [("auto", True), ("always", False), ("never", True)])
    def test_writes_go_through_the_page_cache_unless_told_otherwise(
        self, direct_path: Path, open_backend: Any, direct: str, expected: bool
    ) -> None:
        open_backend(direct_path, direct).put(KEY, self.BLOB)
        assert cached(direct_path) is expected

    def test_small_blobs_go_through_it(self, direct_path: Path, open_backend: Any) -> None:
        open_backend(direct_path).put(KEY, [POOL[:65536]])
        assert cached(direct_path)

    @pytest.mark.parametrize(("nbytes", "expected"), [(1 << 20, True), ((1 << 20) + 4096, False)])
    @pytest.mark.usefixtures("windowless")
    def test_a_small_blob_is_read_from_the_disk_once(
        self, direct_path: Path, open_backend: Any, target: Any, nbytes: int, expected: bool
    ) -> None:
        backend = open_backend(direct_path)
        open_backend(direct_path, "always").put(KEY, [POOL[:nbytes]])
        assert not cached(direct_path)
        assert backend.get_into(KEY, target())
        assert cached(direct_path) is expected

    @pytest.mark.usefixtures("windowless")
    def test_auto_reads_what_is_cached_from_there_and_the_rest_past_it(
        self, direct_path: Path, open_backend: Any, target: Any, drop_from_cache: Any
    ) -> None:
        """Bytes from the page cache are reported in smaller steps."""
        open_backend(direct_path, "never").put(KEY, self.BLOB)
        backend = open_backend(direct_path)
        cold, warm = target(), target()
        assert backend.get_into(KEY, warm)
        drop_from_cache(direct_path)
        assert backend.get_into(KEY, cold)
        assert warm.steps[0] < transfer.DIRECT_STEP_BYTES == cold.steps[0]
        assert not cached(direct_path)


def test_many_are_read_with_few_descriptors(tmp_path: Path, open_backend: Any, target: Any) -> None:
    backend = open_backend(tmp_path)
    keys = [f"{'0a' * 16}/-/{number}-{'3f' * 32}" for number in range(40)]
    for number, key in enumerate(keys):
        backend.put(key, [POOL[:4096], bytes([number])])
    sinks, told = [target() for _ in keys], {}
    free, before = os.dup(0), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 5, before[1]))
    try:
        backend.get_many_into(list(zip(keys, sinks, strict=True)), told.__setitem__)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert told == dict.fromkeys(range(40), True)
    assert [sink.view[-1] for sink in sinks] == list(range(40))


class TestTheFileChangesWhileItIsRead:
    OLD, NEW = b"old" * 100_000, b"new" * 50_000

    def read(self, backend: Any, target: Any, meanwhile: Any) -> Any:
        sink = target()
        reserve = sink.reserve
        sink.reserve = lambda num_bytes: (reserve(num_bytes), meanwhile())[0]
        assert backend.get_into(KEY, sink)
        return sink.view

    @pytest.mark.parametrize("direct", ["auto", "always", "never"])
    def test_replaced_or_deleted_it_is_the_old_one_to_the_end(
        self, direct_path: Path, open_backend: Any, target: Any, direct: str
    ) -> None:
        backend = open_backend(direct_path, direct)
        backend.put(KEY, [self.OLD])
        assert self.read(backend, target, lambda: backend.put(KEY, [self.NEW])) == self.OLD
        assert self.read(backend, target, lambda: backend.delete(KEY)) == self.NEW
        assert not backend.get_into(KEY, target())

    @pytest.mark.parametrize("direct", ["auto", "never"])
    def test_cut_short_it_is_an_error(self, direct_path: Path, open_backend: Any, target: Any, direct: str) -> None:
        backend = open_backend(direct_path, direct)
        backend.put(KEY, [self.OLD])
        (file,) = (path for path in direct_path.rglob("*-*") if path.is_file())
        with pytest.raises(BackendError, match="the file ends after"):
            self.read(backend, target, lambda: os.truncate(file, 1000))


def test_a_sink_without_room_stops_the_read_and_leaks_nothing(tmp_path: Path, open_backend: Any, target: Any) -> None:
    backend = open_backend(tmp_path)
    backend.put(KEY, [b"blob"])
    sink = target()

    def full(num_bytes: int) -> memoryview:
        raise BackendError("no room")

    sink.reserve = full
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    with pytest.raises(BackendError, match="no room"):
        backend.get_into(KEY, sink)
    assert len(before) == (len(os.listdir("/proc/self/fd")) if before else 0)
