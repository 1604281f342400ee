"""Whatever happens to replies on their way, no key ever gets what belongs to another."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom import BackendError, ConfigError
from kvloom_backend_redis import backend as backend_module
from kvloom_backend_redis import leases
from kvloom_backend_redis.address import Endpoint
from kvloom_backend_redis.backend import RedisBackend
from kvloom_backend_redis.config import RedisConfig
from kvloom_backend_redis.errors import ProtocolError, ServerError
from kvloom_backend_redis.link import Link
from kvloom_backend_redis.links import Links
from kvloom_backend_redis.opening import MOST_BYTES
from kvloom_backend_redis.topology import Cluster

KEYS = ["a", "b/c", "d", "e"]
SIZES = (1, 9, 700, 40_000)
KINDS = ("none", "stall", "cut", "lose", "add", "flip", "dribble")
TIMEOUT_SECONDS = 0.03


def blob_of(key: str) -> bytes:
    """Tells by every byte whose it is; and a flipped bit makes it nobody's."""
    number = KEYS.index(key)
    return bytes([0x80 | 0x11 * (number + 1)]) * SIZES[number]


class Memory:
    """A sink. refuses, fails: it raises where memory is asked for, or where it is told of bytes."""

    def __init__(self, *, refuses: bool = False, fails: bool = False) -> None:
        self._refuses, self._fails = refuses, fails

    def reserve(self, num_bytes: int) -> memoryview:
        if self._refuses:
            raise BackendError("no room")
        self.view = memoryview(bytearray(num_bytes))
        return self.view

    def filled(self, num_bytes: int) -> None:
        if self._fails:
            raise BackendError("not such bytes")


@contextlib.contextmanager
def counted_connections() -> Iterator[list[Endpoint]]:
    made: list[Endpoint] = []
    real = Links._connected

    def connected(self: Links, endpoint: Endpoint) -> Link:
        made.append(endpoint)
        return real(self, endpoint)

    with patch.object(Links, "_connected", connected):
        yield made


def have(backend: RedisBackend, config: RedisConfig) -> None:
    """Change the timeouts of every connection."""
    links = backend._links
    links._config = config
    for link in [link for idle in links._idle.values() for link in idle]:
        link.be_patient(config.timeout)


@contextlib.contextmanager
def patience(backend: RedisBackend) -> Iterator[None]:
    """All the time that there is, on every connection."""
    hasty = backend._links._config
    have(backend, hasty.model_copy(update={"timeout": 60.0, "connect_timeout": 60.0}))
    yield
    have(backend, hasty)


def patiently(backend: RedisBackend, read: Callable[[], Any]) -> Any:
    """The result of `read` without faults. Repeated, for what is left of earlier ones may fail one that meets it."""
    with patience(backend):
        for _ in range(3):
            with contextlib.suppress(BackendError, OSError):
                return read()
        return read()


def is_anothers(key: str, blob: Any) -> bool:
    marks = {blob_of(other)[0] for other in KEYS if other != key}
    return len(blob) != SIZES[KEYS.index(key)] or len(marks.intersection(bytes(blob))) > 0


@pytest.fixture(scope="module")
def opened(scripted_server: Any) -> Iterator[tuple[Any, RedisBackend]]:
    server = scripted_server()
    server.blobs.update({b"kvloom:" + key.encode(): blob_of(key) for key in KEYS})
    url = f"redis://127.0.0.1:{server.port}"
    backend = RedisBackend(RedisBackend.Config(url=url, timeout=60.0))  # opening it is not what is tested
    have(backend, backend._links._config.model_copy(update={"timeout": TIMEOUT_SECONDS}))
    yield server, backend
    backend.close()
    server.close()


def read(backend: RedisBackend, verb: str, keys: list[str]) -> dict[str, Any]:
    """Results by key."""
    if verb == "get_many":
        return dict(zip(keys, backend.get_many(keys), strict=True))
    if verb == "get":
        return {key: backend.get(key) for key in keys[:1]}
    if verb == "get_into":
        memory = Memory()
        return {key: memory.view if backend.get_into(key, memory) else None for key in keys[:1]}
    if verb == "get_many_into":
        found = {}
        sinks = [Memory(), Memory(refuses=True), Memory(fails=True), Memory()]

        def done(number: int, outcome: bool | Exception) -> None:
            if number in (1, 2):
                assert str(outcome) == ("no room", "not such bytes")[number - 1], "what its sink raised"
            assert number not in found, "each once"
            found[number] = sinks[number].view if outcome is True else None

        backend.get_many_into(list(zip(keys, sinks, strict=True)), done)
        return {keys[number]: blob for number, blob in found.items()}
    into = memoryview(bytearray(SIZES[KEYS.index(keys[0])]))
    return {keys[0]: into if backend.get_range(keys[0], 0, into) else None}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_reply_is_taken_for_anothers(opened: tuple[Any, RedisBackend], fault: Callable[..., Any], data: Any) -> None:
    spoil_and_read(*opened, fault, data)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(data=st.data())
def test_no_reply_of_many_is_taken_for_anothers(
    opened: tuple[Any, RedisBackend], fault: Callable[..., Any], data: Any
) -> None:
    spoil_and_read(*opened, fault, data)


def spoil_and_read(server: Any, backend: RedisBackend, fault: Callable[..., Any], data: Any) -> None:
    faults = st.builds(
        fault, st.sampled_from(KINDS), st.one_of(st.integers(0, 20), st.integers(0, 41_000)), st.integers(1, 30)
    )
    server.faults[:] = data.draw(st.lists(faults, max_size=6))
    verbs = st.sampled_from(["get", "get_into", "get_many", "get_many_into", "get_range"])
    for verb, keys in data.draw(st.lists(st.tuples(verbs, st.permutations(KEYS)), min_size=2, max_size=5)):
        began = time.monotonic()
        try:
            found = read(backend, verb, keys)
        except (BackendError, OSError):
            found = {}
        server.go_on()
        assert time.monotonic() - began < 60
        for key, blob in found.items():
            assert blob is None or not is_anothers(key, blob), f"{verb} of {key!r}"
    server.faults.clear()
    assert patiently(backend, lambda: backend.get_many(KEYS)) == [blob_of(key) for key in KEYS], "once all is well"


def test_a_reply_that_comes_late_is_nobodys(opened: tuple[Any, RedisBackend], fault: Callable[..., Any]) -> None:
    """The rest of it is sent when its reader has given up, however slow this machine is."""
    server, backend = opened
    for at in (0, 3, 20, 39_999, 40_008):
        server.faults[:] = [fault("stall", at)]
        with pytest.raises(TimeoutError):
            backend.get("e")
        assert patiently(backend, lambda: backend.get("a")) == blob_of("a")
        server.go_on()
        assert patiently(backend, lambda: backend.get("b/c")) == blob_of("b/c")


@pytest.fixture
def patient(scripted: Any) -> Iterator[RedisBackend]:
    """With all the time that there is."""
    scripted.blobs.update({b"kvloom:" + key.encode(): blob_of(key) for key in KEYS})
    backend = RedisBackend(RedisBackend.Config(url=f"redis://127.0.0.1:{scripted.port}"))
    yield backend
    backend.close()


def test_behind_a_large_blob_that_nobody_takes_the_others_come(
    patient: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another connection, for it would take longer to read it and forget it."""
    monkeypatch.setattr(backend_module, "_SKIPPED_BYTES", 700)
    for refused, connections in (("b/c", 0), ("e", 1)):
        with counted_connections() as made:
            keys = [refused, *(key for key in KEYS if key != refused)]
            sinks = [Memory(refuses=key == refused) for key in keys]
            outcomes: dict[int, Any] = {}
            patient.get("a")
            made.clear()
            patient.get_many_into(list(zip(keys, sinks, strict=True)), outcomes.__setitem__)
        assert isinstance(outcomes.pop(0), BackendError) and outcomes == dict.fromkeys((1, 2, 3), True)
        assert [sink.view for sink in sinks[1:]] == [blob_of(key) for key in keys[1:]]
        assert len(made) == connections


def test_a_connection_that_the_server_closed_is_not_used_again(scripted: Any, patient: RedisBackend) -> None:
    assert patient.get("a") == blob_of("a")
    scripted.hang_up()
    time.sleep(0.05)
    assert patient.get("a") == blob_of("a")


def test_a_reply_too_many_is_nobodys(scripted: Any, patient: RedisBackend, fault: Callable[..., Any]) -> None:
    """It comes when its connection waits already to be used again."""
    for key in ("e", "d", "a"):
        scripted.faults[:] = [fault("repeat")]
        assert patient.get(key) == blob_of(key)
        time.sleep(0.15)
        assert patient.get("b/c") == blob_of("b/c") and patient.contains_many(["a", "no"]) == [True, False]


def page(cursor: bytes, *keys: bytes) -> bytes:
    names = b"".join(b"$%d\r\n%b\r\n" % (len(key) + 7, b"kvloom:" + key) for key in keys)
    return b"*2\r\n$%d\r\n%b\r\n*%d\r\n%b" % (len(cursor), cursor, len(keys), names)


def test_a_listing_names_each_key_once(scripted: Any, patient: RedisBackend) -> None:
    scripted.replies[b"SCAN"] = [page(b"9", b"a", b"d", b"a"), page(b"7"), page(b"0", b"d", b"gone", b"e")]
    assert [(entry.key, entry.bytes) for entry in patient.scan()] == [("a", 1), ("d", 700), ("e", 40_000)]


@pytest.mark.parametrize("round_", [1, 2, 7])
def test_a_listing_that_goes_round_ends(scripted: Any, patient: RedisBackend, round_: int) -> None:
    cursors = [b"100", b"101", *[b"%d" % (1 + number % round_) for number in range(50)]]
    scripted.replies[b"SCAN"] = [page(cursor, b"a") for cursor in cursors]
    with pytest.raises(BackendError, match="a listing without an end"):
        list(patient.scan())


def test_a_listing_ends_when_the_backend_is_closed(scripted: Any) -> None:
    backend = RedisBackend(RedisBackend.Config(url=f"redis://127.0.0.1:{scripted.port}"))
    scripted.blobs[b"kvloom:a"] = b"blob"
    scripted.replies[b"SCAN"] = [page(b"%d" % number, b"a") for number in range(1, 9)]
    listing = backend.scan()
    assert next(listing).key == "a"
    backend.close()
    with pytest.raises(BackendError, match="closed while"):
        next(listing)


def test_a_listing_has_a_bound(scripted: Any, patient: RedisBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom_backend_redis.backend._MOST_PAGES", 8)
    monkeypatch.setattr("kvloom_backend_redis.backend._MOST_LISTED", 3)
    scripted.replies[b"SCAN"] = [page(b"%d" % number) for number in range(1, 20)]
    with pytest.raises(BackendError, match="without an end"):
        list(patient.scan())
    scripted.replies[b"SCAN"] = page(b"0", b"a", b"b", b"c", b"d")
    with pytest.raises(BackendError, match="more than 3 keys"):
        list(patient.scan())
    scripted.replies[b"SCAN"] = page(b"9" * 21)
    with pytest.raises(BackendError, match="no page of a listing"):
        list(patient.scan())


@pytest.mark.parametrize("said", [b"\xc2\xb2", b"9" * 5000, b"-1", b""])
def test_a_largest_value_that_is_no_number_is_not_known(scripted: Any, said: bytes) -> None:
    scripted.replies[b"CONFIG"] = b"*2\r\n$18\r\nproto-max-bulk-len\r\n$%d\r\n%b\r\n" % (len(said), said)
    backend = RedisBackend(RedisBackend.Config(url=f"redis://127.0.0.1:{scripted.port}"))
    assert backend._server.most_bytes == MOST_BYTES
    backend.close()


@pytest.mark.parametrize("port", [b"0", b"65536", b"9" * 5000, b"\xc2\xb2", b""])
def test_a_redirection_leads_to_a_port_only(port: bytes) -> None:
    """Port 0 would be the socket of another program on this machine, which would be told the password."""
    answered = Endpoint("127.0.0.1", 6379)
    cluster = Cluster([answered], cast(Links, None))
    with pytest.raises(ProtocolError, match="no address"):
        cluster.redirected(ServerError(f"MOVED 1 /run/other.sock:{port.decode()}"), answered)


@pytest.mark.parametrize("host", [b"a\0b", b"a b", b"h\xc3\xb6st", b"\xff", b"x" * 254, b"a..b"])
def test_a_cluster_whose_table_names_no_host_is_an_error_of_the_store(scripted: Any, host: bytes) -> None:
    """The last one is refused where it is looked up."""
    table = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$%d\r\n%b\r\n:6379\r\n" % (len(host), host)
    scripted.replies[b"CLUSTER"] = table
    config = RedisConfig(url=f"redis+cluster://127.0.0.1:{scripted.port}")
    links = Links(config, db=0)
    cluster = Cluster(config.address.endpoints, links)
    problem = "no connection to" if host == b"a..b" else "no address"
    with pytest.raises(BackendError, match=problem), links.link(cluster.endpoint(b"key")):
        pass
    links.close()


def test_connections_to_a_server_that_has_gone_are_closed_though_nobody_asks_it_any_more(scripted: Any) -> None:
    """A cluster whose nodes are replaced would else leave a few descriptors behind for each of them."""
    links = Links(RedisConfig(url=f"redis://127.0.0.1:{scripted.port}"), db=0)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        former = Endpoint("127.0.0.1", gone.getsockname()[1])
        with links.link(former) as one, links.link(former) as other:
            for _ in range(2):
                gone.accept()[0].close()
    left = Endpoint("127.0.0.1", scripted.port)
    with links.link(left) as kept:
        pass
    assert [link._stream._socket.fileno() for link in (one, other)] == [-1, -1]
    with pytest.raises(BackendError), links.link(former):
        pass
    with links.link(left) as again:
        assert again is kept, "those to others stay"
    links.close()


def test_nobody_is_asked_for_the_cluster_once_it_is_closed(scripted: Any) -> None:
    config = RedisConfig(url=f"redis+cluster://127.0.0.1:{scripted.port}")
    links = Links(config, db=0)
    links.close()
    with pytest.raises(BackendError, match="closed"):
        Cluster(config.address.endpoints, links).masters()
    assert not scripted.connections


def test_many_replies_of_which_one_is_a_refusal(scripted: Any) -> None:
    """All of them are read: what comes next is the answer to what is asked next."""
    backend = RedisBackend(RedisBackend.Config(url=f"redis://127.0.0.1:{scripted.port}"))
    scripted.replies[b"UNLINK"] = b"-READONLY You can't write against a read only replica.\r\n"
    with pytest.raises(BackendError, match="READONLY"):
        backend.delete_many(KEYS)
    scripted.blobs[b"kvloom:a"] = b"blob"
    assert backend.contains_many(["a", "b"]) == [True, False] and backend.get("a") == b"blob"
    assert len(scripted.connections) == 1
    backend.close()


def test_each_blob_of_a_batch_has_its_outcome(scripted: Any, patient: RedisBackend) -> None:
    """A refusal is of one; what is not a reply is of that one and of those behind it, of which nothing is known."""
    names = [b"kvloom:" + key.encode() for key in "abcd"]
    requests = [patient._set(key, [b"blob"]) for key in "abcd"]
    scripted.replies[b"SET"] = [b"+OK\r\n", b"-OOM no\r\n", b"+OK\r\n", b"+OK\r\n"]
    kept = dict(patient._exchange.send(names, requests, backend_module._kept))
    assert [kept[0], kept[2], kept[3]] == [True] * 3 and isinstance(kept[1], ServerError)
    scripted.replies[b"SET"] = [b"+OK\r\n", b"what\r\n", b"+OK\r\n", b"+OK\r\n"]
    kept = dict(patient._exchange.send(names, requests, backend_module._kept))
    assert kept[0] is True and [type(kept[place]) for place in (1, 2, 3)] == [ProtocolError] * 3
    scripted.replies[b"SET"] = [b"+OK\r\n", b"-OOM no\r\n"]
    told: dict[int, Exception | None] = {}
    patient.put_many([("a", [b"blob"]), ("b", [b"blob"])], told.__setitem__)
    assert told[0] is None and isinstance(told[1], ServerError)


def test_outcomes_of_a_batch_are_told_while_it_is_being_sent(scripted: Any, patient: RedisBackend) -> None:
    """The caller's deadline is for each of them after the one before."""
    left = scripted.replies[b"SET"] = [b"+OK\r\n"] * 12
    blob = bytes(1 << 20)
    unanswered: list[int] = []
    patient.put_many([(key, [blob]) for key in "abcdefghijkl"], lambda number, outcome: unanswered.append(len(left)))
    assert unanswered[0] > 0 and unanswered[-1] == 0 and len(unanswered) == 12


@pytest.mark.parametrize(
    ("hello", "problem"),
    [
        (b"-ERR unknown command `HELLO`, with args beginning with: \r\n", "older than Redis 6"),
        (
            b"*4\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$6\r\n5.0.14\r\n",
            "is version 5.0.14; kvloom needs 6.0",
        ),
        (
            b"*4\r\n$4\r\nmode\r\n$8\r\nsentinel\r\n$7\r\nversion\r\n$5\r\n7.0.0\r\n",
            "is a Sentinel; write redis.sentinel",
        ),
        (b"*4\r\n$4\r\nmode\r\n$7\r\ncluster\r\n$7\r\nversion\r\n$5\r\n7.0.0\r\n", "of a cluster; write redis.cluster"),
        (b"*2\r\n$7\r\nversion\r\n$9\r\n5.0\x1b[2J\n\n\r\n", r"is version 5.0\\x1b\[2J\\n\\n; kvloom"),
        (b"-ERR \x1b[2J" + b"x" * 1000 + b"\r\n", r"refuses: ERR \\x1b\[2Jx{200,300}\.\.\.$"),
        (b"-NOAUTH Authentication required.\r\n", "set `password:"),
        (b"HTTP/1.1 400 Bad Request\r\n", "no answer from the server: no reply: b'HTTP/1.1"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", "start when it has"),
    ],
)
def test_servers_that_are_not_what_the_url_says(scripted: Any, hello: bytes, problem: str) -> None:
    scripted.hello = hello
    with pytest.raises(ConfigError, match=problem):
        RedisBackend(RedisBackend.Config(url=f"redis://127.0.0.1:{scripted.port}"))


@pytest.mark.parametrize("version", [b"8.1.0", b"unstable", b"8.x"])
def test_a_later_version_is_fine(scripted: Any, version: bytes) -> None:
    hello = b"*4\r\n$6\r\nserver\r\n$6\r\nvalkey\r\n$7\r\nversion\r\n$%d\r\n%b\r\n"
    scripted.hello = hello % (len(version), version)
    RedisBackend(RedisBackend.Config(url=f"redis://127.0.0.1:{scripted.port}")).close()


def test_a_right_that_no_thread_renews_is_had_for_a_while(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    backend = RedisBackend(RedisBackend.Config(url=f"redis://127.0.0.1:{scripted.port}"))
    scripted.replies[b"EVAL"] = b":1\r\n"
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_more)
        assert backend.hold("evict") and backend.hold("evict")
    assert backend.hold("another") and backend._leases._thread is not None
    backend.close()


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # that is what happens
def test_a_backend_that_nobody_closed_holds_no_right_for_good(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.001)
    backend = RedisBackend(RedisBackend.Config(url=f"redis://127.0.0.1:{scripted.port}"))
    scripted.replies[b"EVAL"] = b":1\r\n"
    assert backend.hold("evict")
    work = backend._leases._thread
    assert work is not None and work.is_alive()
    del backend
    gc.collect()
    work.join(30)
    assert not work.is_alive()
