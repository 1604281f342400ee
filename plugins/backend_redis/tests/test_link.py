"""Replies are read as they are meant, however they come in pieces; and what is not a reply is never taken for one."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom_backend_redis import link as link_module
from kvloom_backend_redis import stream as stream_module
from kvloom_backend_redis.errors import ProtocolError, ServerError
from kvloom_backend_redis.link import Link, Reply, packed


@pytest.fixture(autouse=True, scope="module", params=["native", "python"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Everything here is so of either kind of stream."""
    if request.param == "native" and shutil.which("c++") is None:
        pytest.skip("kvloom-native has no library: there is no C++ compiler that could have built it")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(link_module, "stream", stream_module.Stream)
        else:
            assert stream_module.resp.functions() is not None
        yield request.param


WORDS = st.binary(max_size=40)
LINES = st.text(st.characters(codec="ascii", exclude_characters="\r\n"), max_size=20).map(str.encode)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.integers(-(10**12), 10**12), WORDS, LINES.map(lambda line: ("+", line)),
        LINES.map(lambda line: ("-", line)),
    ),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def encoded(value: Any) -> bytes:
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    if isinstance(value, tuple):
        return value[0].encode() + value[1] + b"\r\n"
    return b"*%d\r\n" % len(value) + b"".join(map(encoded, value))


def plain(value: Any) -> Any:
    """The value read for a sent `value`."""
    if isinstance(value, tuple):
        return value[1] if value[0] == "+" else f"refused: {value[1].decode()}"
    return [plain(one) for one in value] if isinstance(value, list) else value


def shown(reply: Reply) -> Any:
    if isinstance(reply, ServerError):
        return f"refused: {reply}"
    return [shown(one) for one in reply] if isinstance(reply, list) else reply


@contextlib.contextmanager
def linked(timeout: float = 2.0) -> Iterator[tuple[Link, socket.socket]]:
    ours, theirs = socket.socketpair()
    link = Link(ours, timeout=timeout)
    with theirs:
        yield link, theirs
        link.close()


def says(end: socket.socket, data: bytes, cuts: list[int]) -> None:
    """Send `data` in pieces, then hang up."""
    at = 0
    with contextlib.suppress(OSError):
        for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
            end.sendall(data[at:cut])
            at = cut
        end.shutdown(socket.SHUT_WR)


@settings(max_examples=150, deadline=None)
@given(values=st.lists(VALUES, min_size=1, max_size=5), cuts=st.lists(st.integers(0, 10_000), max_size=6))
def test_replies_in_any_pieces(values: list[Any], cuts: list[int]) -> None:
    with linked() as (link, end):
        link.send(packed(b"PING"), replies=len(values))
        talker = threading.Thread(target=says, args=(end, b"".join(map(encoded, values)), cuts))
        talker.start()
        assert not link.clean
        assert [shown(link.reply()) for _ in values] == [plain(value) for value in values]
        assert link.clean
        talker.join()


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 100_000), min_size=1, max_size=4), cuts=st.lists(st.integers(0, 10**6), max_size=6)
)
def test_blobs_in_any_pieces(sizes: list[int], cuts: list[int]) -> None:
    blobs = [bytes([number % 251 + 1]) * size for number, size in enumerate(sizes)]
    with linked() as (link, end):
        link.send(packed(b"PING"), replies=2 * len(blobs))
        talker = threading.Thread(target=says, args=(end, b"".join(encoded(b) + b":7\r\n" for b in blobs), cuts))
        talker.start()
        for blob in blobs:
            assert link.length(1 << 20) == len(blob)
            into, told = bytearray(len(blob)), []

            def filled(size: int, into: bytearray = into, told: list[int] = told, blob: bytes = blob) -> None:
                assert into[:size] == blob[:size]
                told.append(size)

            link.fill(memoryview(into), filled)
            assert into == blob and told == sorted(set(told)) and told[-1:] == [len(blob)] * bool(blob)
            assert link.reply() == 7
        assert link.clean
        talker.join()


REPLIES = st.one_of(
    st.integers(0, 300).map(lambda size: bytes([size % 251]) * size).map(encoded),
    st.sampled_from([0, 21, 22, 23, 16_384, 40_000]).map(lambda size: encoded(b"x" * size)),
    st.sampled_from([b"$-1\r\n", b"-ERR no\r\n", b"+OK\r\n", b":1\r\n", b"$\r\n", b"\r\r\n", b"a" * 20_000]),
    st.sampled_from([301, 2**31, 2**32, 10**18, 2**63, 10**19]).map(lambda size: b"$%d\r\n" % size),
)
DAMAGE = st.tuples(st.integers(0, 10**6), st.integers(0, 3), st.sampled_from([b"", b"9", b"\r", b"\n", b"$", b"-"]))


def outcomes(link: Link, count: int) -> list[object]:
    """The outcome of each blob that is waited for, up to an error after which nothing can come; at last, what is left:
    how much of it has been read when the last blob is whole depends on when it came."""
    said: list[object] = []
    for _ in range(count):
        try:
            size = link.length(40_000)
            if size is None:
                said.append(None)
            else:
                into = bytearray(size)
                told: list[int] = []
                link.fill(memoryview(into), told.append)
                said.append((bytes(into), told[-1:]))
        except ServerError as error:
            said.append(f"refused: {error}")
        except (ProtocolError, OSError) as error:
            return [*said, type(error), str(error), link.clean]
    link.queue(replies=1)
    try:
        return [*said, shown(link.reply())]
    except (ProtocolError, OSError) as error:
        return [*said, type(error), str(error)]


@settings(max_examples=150, deadline=None)
@given(
    replies=st.lists(REPLIES, min_size=1, max_size=4), damage=st.one_of(st.none(), DAMAGE),
    cuts=st.lists(st.integers(0, 10**5), max_size=6),
)  # fmt: skip
def test_native_code_and_python_find_the_same(
    replies: list[bytes], damage: tuple[int, int, bytes] | None, cuts: list[int]
) -> None:
    data = b"".join(replies)
    if damage is not None:
        at = damage[0] % (len(data) + 1)
        data = data[:at] + damage[2] + data[at + damage[1] :]
    found = []
    for make in (stream_module.stream, stream_module.Stream):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link_module, "stream", make)
            with linked() as (link, end):
                link.queue(packed(b"GET", b"a"), replies=len(replies))
                talker = threading.Thread(target=says, args=(end, data, cuts))
                talker.start()
                found.append(outcomes(link, len(replies)))
                link.close()
                talker.join()
    native, python = found
    if "no reply: " in str(python[-2:]):  # how much of a line that has no end was received
        native[-2] = python[-2] = ""
    assert native == python


@pytest.mark.parametrize("raises", [False, True])
def test_a_signal_ends_an_exchange_only_if_its_handler_raises(raises: bool) -> None:
    class Interrupt(BaseException):
        pass

    interrupted: list[int] = []

    def handle(number: int, frame: object) -> None:
        interrupted.append(number)
        end.sendall(b"456\r\n")
        if raises:
            raise Interrupt

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with linked(timeout=60) as (link, end):
            link.queue(packed(b"GET", b"a"))
            end.sendall(b"$6\r\n123")
            into = bytearray(link.length(100) or 0)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            if raises:
                with pytest.raises(Interrupt):
                    link.fill(memoryview(into))
                assert not link.clean
            else:
                link.fill(memoryview(into))
                assert into == b"123456" and link.clean
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted == [signal.SIGALRM]


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200), blob=st.booleans())
def test_garbage_is_an_error_or_a_reply_and_never_hangs(data: bytes, blob: bool) -> None:
    with linked() as (link, end):
        says(end, data, [])
        link.send(packed(b"PING"))
        with contextlib.suppress(ProtocolError, ServerError, OSError):
            if blob:
                size = link.length(1000)
                if size is not None:
                    assert size <= 1000
                    link.fill(memoryview(bytearray(size)))
            else:
                link.reply()
            return
        refusal = data[:1] == b"-" and b"\r\n" in data
        assert refusal or not link.clean


def blob_from(link: Link) -> bytes:
    size = link.length(1000)
    assert size is not None
    into = bytearray(size)
    link.fill(memoryview(into))
    return bytes(into)


@pytest.mark.parametrize(
    "said",
    [
        b"$3\r\nabcd\r\n", b"$3\r\nab\r\n$1", b"$x\r\n", b"$-2\r\n", b"$1001\r\n", b"+OK\r\n", b"?\r\n",
        b"*1\r\n$1\r\na\r\n", b":1\r\n", b"$ 3\r\nabc\r\n", b"$3\nabc\r\n", b"$3\r\nabc\n\n", b"a" * 20_000,
        b"$" + b"0" * 20 + b"3\r\nabc\r\n",
    ],
)  # fmt: skip
def test_what_is_no_blob_is_an_error_and_the_link_is_done_for(said: bytes) -> None:
    with linked() as (link, end):
        link.send(packed(b"GET", b"key"))
        says(end, said, [])
        with pytest.raises((ProtocolError, ConnectionError)):
            blob_from(link)
        assert not link.clean


def test_a_blob_that_is_longer_than_any_can_be_is_an_error_at_once() -> None:
    with linked() as (link, end):
        end.sendall(b"$1001\r\n")
        link.send(packed(b"GET", b"key"))
        with pytest.raises(ProtocolError, match="expected a length"):
            link.length(1000)
        assert not link.clean


def test_an_array_without_end_is_an_error() -> None:
    with linked() as (link, end):
        says(end, b"*1\r\n" * 100, [])
        link.send(packed(b"PING"))
        with pytest.raises(ProtocolError):
            link.reply()
        assert not link.clean


def test_replies_of_one_exchange_have_a_bound_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server, or who is between it and us, could send a million texts of a mebibyte each in one array."""
    monkeypatch.setattr(link_module, "_MOST_REPLIES", 1000)
    text = encoded(b"x" * 400)
    with linked() as (link, end):
        for _ in range(2):
            end.sendall(b"*2\r\n" + 2 * text)
            link.send(packed(b"SCAN", b"0"))
            assert link.reply() == 2 * [b"x" * 400] and link.clean, "each exchange begins anew"
        end.sendall(3 * text)
        link.send(packed(b"INFO"), replies=3)
        assert link.reply() == link.reply() == b"x" * 400
        with pytest.raises(ProtocolError, match="more than 1000 bytes"):
            link.reply()
        assert not link.clean
    with linked() as (link, end):
        end.sendall(b"*100\r\n" + 100 * b":1\r\n")
        link.send(packed(b"SCAN", b"0"))
        with pytest.raises(ProtocolError, match="more than 1000 bytes"):
            link.reply()


def test_a_refusal_leaves_the_link_as_good_as_new() -> None:
    with linked() as (link, end):
        end.sendall(b"-OOM command not allowed\r\n$2\r\nok\r\n")
        link.send(packed(b"GET", b"a"), replies=2)
        with pytest.raises(ServerError, match="OOM command not allowed") as caught:
            link.length(10)
        assert caught.value.word == "OOM" and not link.clean
        assert link.answer() == b"ok" and link.clean


def test_a_reply_that_does_not_come_in_time() -> None:
    with linked(timeout=0.05) as (link, end):
        link.send(packed(b"GET", b"a"))
        end.sendall(b"$1000\r\nabc")
        with pytest.raises(TimeoutError):
            link.fill(memoryview(bytearray(link.length(1000) or 0)))
        assert not link.clean


def test_a_request_that_is_not_taken_in_time() -> None:
    with linked(timeout=0.05) as (link, _):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            link.send(bytes(64 << 20))
        assert time.monotonic() - began < 5 and not link.clean


def test_a_request_of_many_buffers_arrives_in_order() -> None:
    parts = [bytes([number % 256]) * (number % 700) for number in range(3000)]
    with linked() as (link, end):
        sender = threading.Thread(target=link.send, args=parts)
        sender.start()
        got = bytearray()
        while len(got) < sum(map(len, parts)):
            got += end.recv(1 << 16)
        sender.join()
        assert got == b"".join(parts)


def test_a_request_that_is_taken_slowly_arrives_whole() -> None:
    """Bytes sent before the time is over count as progress, wherever in a buffer they were."""
    parts = [bytes([number]) * 700_001 for number in range(1, 9)]
    with linked(timeout=0.8) as (link, end):
        sender = threading.Thread(target=link.send, args=parts)
        sender.start()
        time.sleep(1.1)
        got = bytearray()
        while len(got) < sum(map(len, parts)):
            got += end.recv(100_000)
        sender.join()
        assert got == b"".join(parts)


def test_what_comes_unasked_is_noticed() -> None:
    with linked() as (link, end):
        assert link.silent
        end.sendall(b"$1\r\na\r\n")
        assert not link.silent
    with linked() as (link, end):
        end.shutdown(socket.SHUT_WR)
        assert not link.silent
