"""A server that says a little now and then keeps nobody: what counts is the whole of an exchange."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvloom import BackendError, ConfigError, PartDownError
from kvloom_backend_redis.address import Endpoint
from kvloom_backend_redis.backend import RedisBackend
from kvloom_backend_redis.errors import ServerError, Unreachable
from kvloom_backend_redis.exchange import Exchange
from kvloom_backend_redis.link import Link, packed
from kvloom_backend_redis.links import Links
from kvloom_backend_redis.stream import Stream
from kvloom_backend_redis.topology import Cluster, Topology

AT_MOST_SECONDS = 20.0
"""Far more than anything here takes, and far less than what never ends."""


def drips(end: socket.socket, data: bytes, *, step: int = 1, pause: float = 0.02) -> None:
    with contextlib.suppress(OSError):
        for at in range(0, len(data), step):
            end.sendall(data[at : at + step])
            time.sleep(pause)


@contextlib.contextmanager
def linked(timeout: float, talk: Callable[[socket.socket], None]) -> Iterator[Link]:
    ours, theirs = socket.socketpair()
    talker = threading.Thread(target=talk, args=(theirs,))
    link = Link(ours, timeout=timeout)
    link.send(packed(b"GET", b"a"), replies=1000)
    talker.start()
    yield link
    link.close()
    theirs.close()
    talker.join(AT_MOST_SECONDS)


def read_all(link: Link) -> None:
    for _ in range(1000):
        link.answer()


@pytest.mark.parametrize("said", [b"+" + b"x" * 5000, b":1\r\n" * 1000, b"$5000\r\n" + b"x" * 5000, b"*1000\r\n" * 500])
def test_what_comes_a_byte_at_a_time_is_given_up(said: bytes) -> None:
    began = time.monotonic()
    with (
        linked(0.3, lambda end: drips(end, said)) as link,
        pytest.raises(TimeoutError, match=r"bytes in .* s are too few"),
    ):
        read_all(link)
    assert time.monotonic() - began < AT_MOST_SECONDS and not link.clean


def test_a_blob_that_comes_a_byte_at_a_time_is_given_up() -> None:
    with linked(0.3, lambda end: drips(end, b"$5000\r\n" + b"x" * 5000)) as link, pytest.raises(TimeoutError):
        link.fill(memoryview(bytearray(link.length(5000) or 0)))


def test_what_is_taken_steadily_by_tls_may_take_longer_than_the_timeout() -> None:
    """Its `sendall` has the timeout for all bytes."""
    ours, theirs = socket.socketpair()
    stream = Stream(ours, timeout=0.5)
    stream._vectored = False  # as if it were TLS
    ours.settimeout(0.5)

    def take() -> None:
        while theirs.recv(1 << 16):
            time.sleep(0.05)

    taker = threading.Thread(target=take)
    taker.start()
    try:
        stream.send([bytes(3 << 19)])
    finally:
        stream.close()
        taker.join(AT_MOST_SECONDS)
        theirs.close()


def test_what_comes_steadily_may_take_longer_than_the_timeout() -> None:
    blob = bytes(range(256)) * 4096
    with linked(0.3, lambda end: drips(end, b"$%d\r\n%b\r\n" % (len(blob), blob), step=1 << 16, pause=0.05)) as link:
        into = bytearray(link.length(1 << 20) or 0)
        link.fill(memoryview(into))
    assert into == blob


def test_who_takes_long_to_use_what_came_is_not_the_network() -> None:
    blob = bytes(1 << 12)

    def talk(end: socket.socket) -> None:
        end.sendall(b"$%d\r\n%b\r\n" % (len(blob), blob) * 3)

    with linked(0.2, talk) as link:
        for _ in range(3):
            link.fill(memoryview(bytearray(link.length(1 << 12) or 0)), lambda size: time.sleep(0.15))


def test_each_exchange_has_the_time_anew() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours, timeout=0.3)
    with theirs:
        for _ in range(4):
            link.send(packed(b"PING"))
            talker = threading.Thread(target=drips, args=(theirs, b"+OK\r\n"), kwargs={"pause": 0.03})
            talker.start()
            assert link.answer() == b"OK"
            talker.join()
    link.close()


# -- opening -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    def serving(end: socket.socket) -> None:
        with end:
            serve(end)

    def loop() -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = listener.accept()
                threading.Thread(target=serving, args=(end,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=loop, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def flood(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            end.sendall(b"+OK\r\n" * 1000)


@pytest.mark.parametrize("settings", [{}, {"password": "hunter2"}, {"db": 1}])
@pytest.mark.parametrize("said", [b"+", b"*1\r\n", b":1\r\n"])
def test_a_server_that_drips_does_not_keep_an_engine_from_being_refused(settings: dict[str, Any], said: bytes) -> None:
    path = f"/{settings.pop('db', 0)}"
    with listening(lambda end: drips(end, said * 5000)) as port:
        config = RedisBackend.Config(
            url=f"redis://127.0.0.1:{port}{path}", timeout=0.2, connect_timeout=0.2, **settings
        )  # fmt: skip
        began = time.monotonic()
        with pytest.raises(ConfigError):
            RedisBackend(config)
        assert time.monotonic() - began < AT_MOST_SECONDS


@pytest.mark.parametrize("settings", [{}, {"password": "hunter2"}])
def test_what_says_ok_to_everything_is_no_server(settings: dict[str, Any]) -> None:
    with listening(flood) as port, pytest.raises(ConfigError, match=r"not (a )?Redis"):
        RedisBackend(RedisBackend.Config(url=f"redis://127.0.0.1:{port}", timeout=0.5, **settings))


def replying(*replies: bytes) -> Callable[[socket.socket], None]:
    def serve(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for reply in replies:
                end.recv(1 << 16)
                end.sendall(reply)
            end.recv(1)

    return serve


def test_a_login_is_said_in_redis_words_and_its_refusal_told() -> None:
    heard: list[bytes] = []

    def serve(end: socket.socket) -> None:
        for reply in (b"+OK\r\n", b"+OK\r\n"):
            heard.append(end.recv(1 << 16))
            end.sendall(reply)

    with listening(serve) as port:
        config = RedisBackend.Config(url=f"redis://127.0.0.1:{port}/3", username="me", password="pw")
        links = Links(config, db=3)
        with links.link(Endpoint("127.0.0.1", port)) as link:
            assert link.clean
        links.close()
    assert heard == [packed(b"AUTH", b"me", b"pw"), packed(b"SELECT", b"3")]
    for reply, kind in ((b"-WRONGPASS no\r\n", ServerError), (b":1\r\n", Unreachable), (b"", Unreachable)):
        with listening(replying(reply)) as port:
            seconds = 20.0 if reply else 0.2
            config = RedisBackend.Config(url=f"redis://127.0.0.1:{port}", password="pw", connect_timeout=seconds)
            with pytest.raises(BackendError) as caught, Links(config, db=0).link(Endpoint("127.0.0.1", port)):
                pass
            assert type(caught.value) is kind and "pw" not in str(caught.value)


# -- several servers ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def silent(count: int) -> Iterator[list[Endpoint]]:
    """Servers that take connections and say nothing, as frozen ones do."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        yield [Endpoint("127.0.0.1", one.getsockname()[1]) for one in listeners]


def answering(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                while connection.recv(4096):
                    connection.sendall(b"*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$0\r\n\r\n:7000\r\n$2\r\nid\r\n")


def test_silent_nodes_of_a_cluster_are_not_waited_for_one_after_another() -> None:
    config = RedisBackend.Config(url="redis+cluster://localhost", timeout=AT_MOST_SECONDS)
    with silent(5) as frozen, socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answering, args=(listener,), daemon=True).start()
        alive = Endpoint("127.0.0.1", listener.getsockname()[1])
        links = Links(config, db=0)
        began = time.monotonic()
        assert Cluster([*frozen, alive], links).masters() == (Endpoint("127.0.0.1", 7000),)
        assert time.monotonic() - began < AT_MOST_SECONDS, "one of them alone takes as long"
        links.close()
        listener.shutdown(socket.SHUT_RDWR)


def test_writes_to_many_silent_nodes_end_together() -> None:
    config = RedisBackend.Config(url="redis+cluster://localhost", timeout=0.2)
    with silent(8) as frozen:
        links = Links(config, db=0)
        spread = Exchange(Spread(frozen), links)
        keys = [b"%d" % number for number in range(8)]
        outcomes = dict(spread.send(keys, [[packed(b"SET", key, b"")] for key in keys], Link.answer))
        texts = [str(outcomes[place]) for place in range(8)]
        assert "was not tried" in texts[-1] and "was not tried" not in texts[0]
        links.close()


def test_the_time_of_who_takes_the_answers_is_not_that_of_a_server_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + skipped[0])
    monkeypatch.setattr("kvloom_backend_redis.exchange.time", clock)

    def answers_once(end: socket.socket) -> None:
        end.recv(1 << 16)
        end.sendall(b"+OK\r\n")

    with listening(answers_once) as first, listening(answers_once) as second:
        links = Links(RedisBackend.Config(url="redis+cluster://localhost"), db=0)
        spread = Exchange(Spread([Endpoint("127.0.0.1", port) for port in (first, second)]), links)
        outcomes = []
        for _, outcome in spread.send([b"0", b"0", b"1"], [[packed(b"SET", b"k", b"")]] * 3, Link.answer):
            outcomes.append(outcome)
            skipped[0] += 100
        links.close()
    good, lost, other = outcomes
    assert good == other == b"OK" and isinstance(lost, PartDownError) and isinstance(lost.__cause__, ConnectionError)


def test_a_refusal_beside_a_server_that_fails_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [Endpoint("127.0.0.1", port) for port in (1, 2, 3)]
    links = Links(RedisBackend.Config(url="redis+cluster://localhost"), db=0)
    spread = Exchange(Spread(servers), links)
    refuses = True

    def at(endpoint: Endpoint, *requests: bytes) -> list[object]:
        if endpoint.port == 1:
            raise Unreachable("it is down")
        return [ServerError("LOADING") if refuses and endpoint.port == 2 else 1]

    monkeypatch.setattr(spread, "at", at)
    keys = [b"0", b"1", b"2"]
    with pytest.raises(ServerError, match="LOADING"):
        spread.many(keys, keys, otherwise=0)
    refuses = False
    assert spread.many(keys, keys, otherwise=0) == [0, 1, 1]
    with pytest.raises(PartDownError):
        spread.many(keys, keys)
    with pytest.raises(PartDownError):
        spread.many(keys[:1], keys[:1])
    assert spread.many(keys[:1], keys[:1], otherwise=0) == [0]
    links.close()


def test_a_server_is_a_part_of_the_store_only_while_others_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [Endpoint("127.0.0.1", port) for port in (1, 2, 3)]
    links = Links(RedisBackend.Config(url="redis+cluster://localhost", timeout=0.1), db=0)
    spread, asked, down = Exchange(Spread(servers), links), [], {1}

    def at(endpoint: Endpoint, *requests: bytes) -> list[object]:
        asked.append(endpoint.port)
        if endpoint.port in down:
            time.sleep(0.06)
            raise Unreachable("it is down")
        return [1]

    monkeypatch.setattr(spread, "at", at)
    assert [spread.many([key], [key], otherwise=0) for key in (b"0", b"0", b"1")] == [[0], [0], [1]]
    assert asked == [1, 2], "it is not asked again so soon"
    down |= {2, 3}
    assert spread.many([b"1"], [b"1"], otherwise=0) == [0], "another may answer, as far as is known"
    with pytest.raises(Unreachable):
        spread.many([b"2"], [b"2"], otherwise=0)
    with pytest.raises(Unreachable):
        spread.many([b"1"], [b"1"], otherwise=0)
    down.clear()
    assert spread.many([b"1"], [b"1"]) == [1]
    with pytest.raises(PartDownError, match="a moment ago"):
        spread.many([b"2"], [b"2"])
    links.close()


def test_servers_that_hang_take_the_time_of_one_together(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [Endpoint("127.0.0.1", port) for port in range(1, 9)]
    links = Links(RedisBackend.Config(url="redis+cluster://localhost", timeout=0.1), db=0)
    spread, asked = Exchange(Spread(servers), links), []

    def at(endpoint: Endpoint, *requests: bytes) -> list[object]:
        asked.append(endpoint.port)
        if endpoint.port < 8:
            time.sleep(0.1)
            raise Unreachable("it hangs")
        return [1]

    monkeypatch.setattr(spread, "at", at)
    keys = [b"%d" % number for number in range(8)]
    assert spread.many(keys, keys, otherwise=0) == [0] * 8 and asked == [1]
    links.close()


class Spread(Topology):
    """A server for each key, by its number."""

    def __init__(self, endpoints: list[Endpoint]) -> None:
        self._endpoints = endpoints

    def endpoint(self, key: bytes) -> Endpoint:
        return self._endpoints[int(key)]

    def masters(self) -> list[Endpoint]:
        return self._endpoints

    @property
    def known(self) -> list[Endpoint]:
        return self._endpoints
