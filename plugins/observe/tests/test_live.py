"""The socket of a live view: whose it is, what it says, and what is left when an engine has gone."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import stat
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observe_support import busy, kv_of, opened, own_sockets, path_of, settled, tokens_of
from typer.testing import CliRunner

from kvloom import BackendError, ChunkKey, ConfigError
from kvloom.cli.main import app
from kvloom_observe.http_messages import Response
from kvloom_observe.http_server import HTTPServer
from kvloom_observe.live import sockets
from kvloom_observe.live.prefixes import Prefixes
from kvloom_observe.live.series import NAMES, Series

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own_sockets(short_path, monkeypatch)
    return short_path / "kvloom"


def test_it_says_what_happened(tmp_path: Path) -> None:
    with opened(tmp_path, {"type": "live", "prefill_tokens_per_second": 24}, instance_id="mine") as engine:
        busy(engine)
        told = sockets.ask(path_of(engine), series=True)
    assert told["engine"]["instance_id"] == "mine" and told["engine"]["pid"] == os.getpid()
    assert (told["requests"]["count"], told["requests"]["asked_tokens"], told["requests"]["served_tokens"]) == (
        4,
        64,
        48,
    )
    assert told["saved"] == {"tokens": 48, "prefill_tokens_per_second": 24.0, "seconds": 2.0}
    memory, disk = told["tiers"]
    assert (memory["served_tokens"], disk["served_tokens"]) == (32, 16) and disk["read_seconds"]["p50"] > 0
    assert told["missed"] == {"in no tier": 4, "behind a miss": 12} and told["evicted"]["capacity"] > 0
    hottest = told["prefixes"][0]
    assert (hottest["tokens"], hottest["hits"], hottest["saved_tokens"]) == (16, 2, 32)
    assert sum(told["series"]["1"]["served"]) == sum(told["series"]["10"]["served"]) == 48


def test_the_socket_is_the_users_alone_and_goes_with_the_engine(tmp_path: Path, runtime: Path) -> None:
    with opened(tmp_path, "live", instance_id="a b/c") as engine:
        path = path_of(engine)
        assert path.parent == runtime and path.name == f"a_b_c-{os.getpid()}.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(runtime.stat().st_mode) == 0o700
        assert sockets.running() == [path]
        with opened(tmp_path / "2", "live", instance_id="a b/c") as other:
            assert path_of(other) != path and len(sockets.running()) == 2
    assert not path.exists() and sockets.running() == []


@pytest.mark.parametrize("usual", ["open", "link", "file", "long"])
def test_a_directory_that_is_not_the_users_alone_is_left_for_another(
    tmp_path: Path, runtime: Path, usual: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if usual == "open":
        runtime.mkdir()
        runtime.chmod(0o777)
    elif usual == "link":
        runtime.symlink_to(tmp_path)
    elif usual == "file":
        runtime.touch()
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("x" * 90)))
    one, two = sockets.bind_default("one"), sockets.bind_default("two")
    assert one.path.parent == two.path.parent != runtime and stat.S_IMODE(one.path.parent.stat().st_mode) == 0o700
    assert sockets.running() == [one.path, two.path] and "`top` finds it" in caplog.text
    for bound in (one, two):
        bound.listener.close()
        bound.close()
    assert sockets.running() == [] and list(one.path.parent.iterdir()) == []


def test_paths_that_cannot_be(tmp_path: Path, short_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"observers\.0: .*too long for a socket"):
        opened(tmp_path, {"type": "live", "path": str(tmp_path / ("x" * 120))})
    (short_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"observers\.0: .*not a socket"):
        opened(tmp_path, {"type": "live", "path": str(short_path / "file")})
    with opened(tmp_path, {"type": "live", "path": str(short_path / "s")}):
        with pytest.raises(ConfigError, match=r"observers\.0: .*another engine's"):
            opened(tmp_path / "2", {"type": "live", "path": str(short_path / "s")})
        assert sockets.ask(short_path / "s")
    assert (short_path / "file").read_text() == "mine"


@forks
def test_what_a_dead_process_left_is_cleared_away(runtime: Path) -> None:
    child = os.fork()
    if not child:  # pragma: no cover
        sockets.bind_default("child")
        os._exit(0)
    os.waitpid(child, 0)
    (path,) = runtime.glob("*.sock")
    assert sockets.running() == [] and list(runtime.iterdir()) == []
    again = sockets.bind(path)
    assert sockets.running() == [path]
    again.listener.close()
    again.close()


def test_an_engine_that_does_not_answer_keeps_its_socket(runtime: Path) -> None:
    """Like a process under SIGSTOP: nothing accepts, until the queue is full."""
    bound = sockets.bind_default("stopped")
    with contextlib.ExitStack() as stack:
        while True:
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            if one.connect_ex(str(bound.path)) == errno.EAGAIN:
                break
        assert sockets.running() == [bound.path] and bound.path.exists()
        with pytest.raises(OSError, match="another engine's"):
            sockets.bind(bound.path)
        error = CliRunner().invoke(app(), ["top", "--once"]).exception
        assert isinstance(error, BackendError) and "does not answer: it is stopped or busy" in str(error)
    bound.listener.close()
    bound.close()
    assert sockets.running() == []


def test_a_socket_of_another_program_is_left_alone(short_path: Path) -> None:
    path = short_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(OSError, match="another program's"):
            sockets.bind(path)
        assert path.exists() and list(short_path.glob("*.lock")) == []


@pytest.mark.parametrize("short_of", ["descriptors", "threads"])
def test_a_server_that_cannot_start_leaves_nothing(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, short_of: str
) -> None:
    def open_sockets() -> list[str]:
        files = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return sorted(os.readlink(one) for one in files if os.path.islink(one) and "socket:" in os.readlink(one))

    start, before = threading.Thread.start, open_sockets()

    def no_descriptors() -> None:
        raise OSError(errno.EMFILE, "there is none left")

    def no_threads(thread: threading.Thread) -> None:
        if thread.name == "kvloom-live":
            raise RuntimeError("there is none left")
        start(thread)

    if short_of == "descriptors":
        monkeypatch.setattr(socket, "socketpair", no_descriptors)
    else:
        monkeypatch.setattr(threading.Thread, "start", no_threads)
    with pytest.raises(Exception, match="none left") as caught, opened(tmp_path, "live"):
        pass
    assert caught.tb is not None, "it keeps the objects, and so their sockets, from being collected"
    assert not sockets._bound and not sockets.running() and open_sockets() == before


@pytest.mark.skipif(os.getuid() != 0, reason="files of another user are to be made")
def test_the_lock_of_another_user_is_not_taken(short_path: Path) -> None:
    lock = short_path / "s.lock"
    lock.touch()
    os.chown(lock, 65534, 65534)
    with pytest.raises(OSError, match="belongs to another user"):
        sockets.bind(short_path / "s")
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(OSError, match="belongs to another user"):
        sockets.bind(short_path / "s")


def test_binding_leaves_the_mask_of_new_files_alone(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the whole process: what other threads make meanwhile would get it too."""
    monkeypatch.setattr(os, "umask", lambda _: pytest.fail("the mask of the process is changed"))
    bound = sockets.bind(short_path / "s")
    assert stat.S_IMODE(bound.path.stat().st_mode) == 0o600
    bound.listener.close()
    bound.close()


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[1]", b"[" * 100_000, b'{"versions": 1}', b'{"version": 2}'])
def test_what_is_no_snapshot_is_said(short_path: Path, body: bytes) -> None:
    bound = sockets.bind(short_path / "s")
    server = HTTPServer(bound.listener, lambda _: Response(200, body))
    server.start()
    with pytest.raises(ValueError, match=r"no engine of kvloom answers there|is of another version"):
        sockets.ask(bound.path)
    server.close()
    bound.close()


@forks
def test_a_forked_child_leaves_the_socket_alone(tmp_path: Path) -> None:
    with opened(tmp_path, "live") as engine:
        path = path_of(engine)
        child = os.fork()
        if not child:  # pragma: no cover
            engine.close()
            for observer in engine._events._observers:
                observer.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert sockets.ask(path)["engine"]["pid"] == os.getpid()


@forks
def test_a_forked_child_does_not_hold_the_lock_of_a_dead_parent(runtime: Path) -> None:
    ready, go = os.pipe()
    parent = os.fork()
    if not parent:  # pragma: no cover
        try:
            sockets.bind_default("parent")
            if not os.fork():
                os.close(go)
                os.read(ready, 1)
        finally:
            os._exit(0)
    os.waitpid(parent, 0)
    assert len(list(runtime.glob("*.sock"))) == 1
    until = time.monotonic() + 20
    while sockets.running() and time.monotonic() < until:  # until the child of the child has run what forks run
        time.sleep(0.001)
    assert sockets.running() == []
    os.close(go)
    os.close(ready)


def test_who_talks_nonsense_or_hangs_up_hurts_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, "live") as engine:
        for text in (b"\0\0\0\r\n\r\n", b"GET /else HTTP/1.0\r\n\r\n", b""):
            with socket.socket(socket.AF_UNIX) as one:
                one.connect(str(path_of(engine)))
                one.sendall(text)
        engine.store(tokens_of(8), kv=kv_of(8))
        settled(engine)
        assert sockets.ask(path_of(engine))["version"] == 1
        monkeypatch.setattr(sockets, "_MAX_ANSWER_BYTES", 100)
        with pytest.raises(ValueError):  # no more of an answer is read than one can have
            sockets.ask(path_of(engine))


def key(number: int) -> ChunkKey:
    return ChunkKey("f/-", 0, hashlib.sha256(str(number).encode()).digest())


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=60))
def test_prefixes_count_every_hit_where_there_is_room(hits: list[tuple[int, int]]) -> None:
    """Chains share their first three chunks: a hit of `served` chunks counts at 1, 2, 4, ... and its end."""
    prefixes, expected = Prefixes(), {}
    chains = [[key(at if at < 3 else 100 * (number + 1) + at) for at in range(9)] for number in range(4)]
    ends = [4 * (at + 1) for at in range(9)]
    for number, served in hits:
        prefixes.hit(chains[number], ends, served)
        for depth in {1, 2, 4, 8} | {served}:
            if depth <= served:
                digest = chains[number][depth - 1].digest.hex()[:12]
                expected[digest] = expected.get(digest, 0) + 1
    assert {one.digest: one.hits for one in prefixes._counts.values()} == expected
    told = prefixes.hottest(100)
    assert [one.saved_tokens for one in told] == sorted((one.saved_tokens for one in told), reverse=True)
    assert not hits or told[0].saved_tokens == max(one.saved_tokens for one in prefixes._counts.values())


def test_few_prefixes_are_kept_and_the_hot_ones_are_among_them() -> None:
    prefixes = Prefixes(most=8)
    for number in range(300):
        prefixes.hit([key(1000 + number)], [4], 1)
        prefixes.hit([key(1)], [4], 1)
    assert len(prefixes._counts) == 8 and prefixes.hottest(1)[0].hits == 300


def test_series_are_bounded_and_gaps_are_zeros() -> None:
    now = [1000.0]
    series = Series(lambda: now[0])
    for _ in range(400):
        series.add(asked=2, served=1)
        now[0] += 1
    now[0] += 5
    columns = series.columns(1)
    assert len(columns["at"]) == 300 and columns["asked"][-6:] == [0.0] * 6 and columns["asked"][0] == 2
    assert series.columns(10)["asked"][1] == 20 and series.lately(10)["asked"] == 1.0
    assert Series(time.time).columns(1) == {"at": [], **{name: [] for name in NAMES}}


def test_settings(tmp_path: Path) -> None:
    for none in (0, float("inf")):  # the latter is not JSON
        with pytest.raises(ConfigError, match="prefill_tokens_per_second"):
            opened(tmp_path, {"type": "live", "prefill_tokens_per_second": none})
