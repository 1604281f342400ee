"""Between processes: who sees what, memory that has to be registered, and writers that exclude each other."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvloom import BackendError, CorruptBlobError
from kvloom_backend_mooncake import memories
from kvloom_backend_mooncake.backend import MooncakeBackend
from kvloom_backend_mooncake.codes import NoRoomError
from kvloom_backend_mooncake.testing import MooncakeMaster, MooncakePeer

Open = Callable[..., MooncakeBackend]
BLOB = os.urandom(3_000_017)


class Pool:
    """Memory as the core's pool has it, and a sink that reserves from it, `shift` bytes off."""

    def __init__(self, num_bytes: int = 16 << 20) -> None:
        self.memory = memoryview(mmap.mmap(-1, num_bytes))
        self.shift, self.size = 0, 0

    def reserve(self, num_bytes: int) -> memoryview:
        self.size = num_bytes
        return self.memory[self.shift :][:num_bytes]

    def filled(self, num_bytes: int) -> None:
        assert num_bytes == self.size


@pytest.fixture(params=["any memory", "registered memory"])
def protocol_needs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """RDMA wants memory registered; TCP then does as well."""
    if request.param == "registered memory":
        monkeypatch.setattr(memories, "NEED_NOT_KNOW", frozenset())
    return str(request.param)


def test_a_pool_that_was_registered_is_read_and_written_directly(
    master: MooncakeMaster, peer: MooncakePeer, open_backend: Open, protocol_needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, pool = open_backend(master), Pool()
    one, two = (f"{protocol_needs.split()[0]}/pool/{name}" for name in "ab")
    backend.register(pool.memory)
    backend.register(pool.memory)
    monkeypatch.setattr(memories, "_staged", None)  # nothing is copied
    pool.memory[5 : 5 + len(BLOB)] = BLOB
    backend.put(one, [pool.memory[5:100], pool.memory[100 : 5 + len(BLOB)]])
    pool.shift = 8_000_001
    assert backend.get_into(one, pool) and pool.memory[pool.shift :][: pool.size] == BLOB
    assert backend.get_range(one, 100, pool.memory[:50]) and pool.memory[:50] == BLOB[100:150]
    assert backend.create(two, [pool.memory[:50]]) and not backend.create(two, [pool.memory[:50]])


def test_other_memory_works_too(
    master: MooncakeMaster, peer: MooncakePeer, open_backend: Open, protocol_needs: str
) -> None:
    backend = open_backend(master)
    one, two = (f"{protocol_needs.split()[0]}/other/{name}" for name in "ab")
    backend.register(Pool().memory)
    backend.put(one, [BLOB[:1], memoryview(BLOB)[1:]])
    assert bytes(backend.get(one) or b"") == BLOB
    into = memoryview(bytearray(1000))
    assert backend.get_range(one, 2_000_000, into) and into == BLOB[2_000_000:2_001_000]
    assert backend.create(two, [BLOB]) and bytes(backend.get(two) or b"") == BLOB


def test_reads_come_from_whoever_holds_the_blob(open_backend: Open) -> None:
    with MooncakeMaster() as master, MooncakePeer(master.address, segment=64 << 20):
        one, two = open_backend(master, segment=64 << 20), open_backend(master)
        for number in range(12):
            one.put(f"pooled/{number}", [BLOB])
        assert [bytes(two.get(f"pooled/{number}") or b"") == BLOB for number in range(12)] == [True] * 12
        two.delete_many([f"pooled/{number}" for number in range(12)])
        assert one.contains_many([f"pooled/{number}" for number in range(12)]) == [False] * 12


def test_replicas_outlive_a_peer(open_backend: Open) -> None:
    with MooncakeMaster(options=["--client_ttl=2"]) as master, MooncakePeer(master.address) as one:
        with MooncakePeer(master.address):
            backend = open_backend(master, replicas=2, timeout="1s")
            for number in range(4):
                backend.put(f"twice/{number}", [BLOB])
            one.kill()
            found = []
            for number in range(4):
                with contextlib.suppress(BackendError):
                    found.append(bytes(backend.get(f"twice/{number}") or b"") == BLOB)
        assert all(found)


WRITERS = """
import sys
from kvloom_backend_mooncake.backend import MooncakeBackend
backend = MooncakeBackend(MooncakeBackend.Config(master=sys.argv[1], local_host="127.0.0.1"))
print("ready", flush=True)
sys.stdin.readline()
print(" ".join(str(int(backend.create(f"race/{n}", [sys.argv[2].encode() * 3000]))) for n in range(50)), flush=True)
backend.close()
"""


def test_of_many_processes_one_creates(master: MooncakeMaster, peer: MooncakePeer, open_backend: Open) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITERS, master.address, str(number)], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for number in range(4)
    ]  # fmt: skip
    try:
        for writer in writers:
            assert writer.stdout and writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin
            writer.stdin.write("go\n")
            writer.stdin.flush()
        told = np.array([[int(word) for word in writer.communicate(timeout=60)[0].split()] for writer in writers])
    finally:
        for writer in writers:
            writer.kill()
    assert told.shape == (4, 50) and (told.sum(axis=0) == 1).all()
    backend = open_backend(master)
    for number, winner in enumerate(told.argmax(axis=0)):
        assert bytes(backend.get(f"race/{number}") or b"") == str(winner).encode() * 3000


def test_two_clients_that_write_one_key_leave_one_blob_whole(
    master: MooncakeMaster, peer: MooncakePeer, open_backend: Open
) -> None:
    clients = [open_backend(master), open_backend(master)]

    def write(client: MooncakeBackend, first: int) -> None:
        for number in range(30):
            client.put("both", [bytes([first + number]) * (20_000 + number)])

    threads = [threading.Thread(target=write, args=(client, 100 * n)) for n, client in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = bytes(clients[0].get("both") or b"")
    assert found and set(found) in ({29}, {129}) and len(found) == 20_029


def test_threads_of_one_client_that_replace_one_key_show_nothing_torn(
    master: MooncakeMaster, peer: MooncakePeer, open_backend: Open
) -> None:
    client, reader = open_backend(master), open_backend(master)
    torn: list[int] = []
    for turn in range(10):  # without turns, one in ten of these showed what was not written yet
        key = f"torn/{turn}"

        def write(first: int, key: str = key) -> None:
            for number in range(first, 60, 2):
                client.put(key, [bytes([number]) * 100, bytes([number]) * (40_000 + 997 * number)])

        writers = [threading.Thread(target=write, args=(first,)) for first in (0, 1)]

        def read(of: MooncakeBackend, key: str = key, writers: list[threading.Thread] = writers) -> None:
            while any(writer.is_alive() for writer in writers):
                blob = bytes(of.get(key) or b"")
                if blob and blob != blob[:1] * (40_100 + 997 * blob[0]):
                    torn.append(len(blob))

        readers = [threading.Thread(target=read, args=(of,)) for of in (client, reader)]
        for thread in (*writers, *readers):
            thread.start()
        for thread in (*writers, *readers):
            thread.join()
    assert torn == []


def test_a_leased_blob_is_deleted_at_once_and_its_memory_stays_until_later(
    master: MooncakeMaster, peer: MooncakePeer, open_backend: Open
) -> None:
    backend = open_backend(master)
    backend.put("leased", [BLOB])
    assert backend.contains("leased")
    backend.delete("leased")
    assert not backend.contains("leased") and backend.get("leased") is None
    backend.put("leased", [b"anew"])
    assert backend.contains("leased") and bytes(backend.get("leased") or b"") == b"anew"


def test_no_room_is_an_error_and_nothing_is_there(open_backend: Open) -> None:
    with MooncakeMaster() as master, MooncakePeer(master.address, segment=32 << 20):
        backend = open_backend(master)
        with pytest.raises(BackendError, match="code -200"):
            backend.put("too/large", [bytes(40 << 20)])
        assert not backend.contains("too/large")


def test_eviction_at_the_watermark_never_gives_anything_else(open_backend: Open) -> None:
    """Leases of 100 ms, so that the master evicts what was read just now; 4 times as much as there is room for."""
    options = ["--eviction_high_watermark_ratio=0.6", "--eviction_ratio=0.2"]
    with MooncakeMaster(lease=100, options=options) as master, MooncakePeer(master.address, segment=32 << 20):
        backend, found, refused = open_backend(master), 0, 0
        for number in range(128):
            blob = bytes([number]) * (1 << 20)
            try:
                backend.put(f"many/{number}", [blob])
            except NoRoomError:
                refused += 1
            for back in range(0, number + 1, 7):
                try:
                    got = backend.get(f"many/{number - back}")
                except (BackendError, CorruptBlobError):
                    continue
                assert got is None or bytes(got) == bytes([number - back]) * (1 << 20)
                found += got is not None
        assert found and refused < 128
        assert not all(backend.contains_many([f"many/{number}" for number in range(128)])), "it has evicted"


def test_a_pool_to_which_nobody_contributes(open_backend: Open) -> None:
    with MooncakeMaster() as master:
        with pytest.raises(ValueError, match=r"^segment: no process contributes"):
            open_backend(master).check_writable()
        open_backend(master, segment=16 << 20).check_writable()


@pytest.fixture
def silent() -> Iterator[str]:
    """An address where connections are accepted, and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_master_that_says_nothing_is_an_error_at_start(silent: str, open_backend: Open) -> None:
    with pytest.raises(ValueError, match=r"^master: the client could not be set up"):
        open_backend(silent, timeout="300ms", connect_timeout="300ms")
