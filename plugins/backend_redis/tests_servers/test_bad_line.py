"""An engine whose line garbles what a server says does no harm to what others have stored there."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from kvloom import Engine, KVSpec
from kvloom_backend_redis.testing import RedisServer

SPEC = KVSpec("m", num_layers=2, num_kv_heads=2, head_size=64, dtype="float32")
CHUNK = 16
TOKENS = torch.arange(4 * CHUNK)
KV = torch.rand(SPEC.blob_shape(4 * CHUNK), generator=torch.Generator().manual_seed(1))

Garble = Callable[[bytes], bytes]


def flipped(data: bytes) -> bytes:
    """Blobs come in large pieces, several in one; what is short passes as it is."""
    if len(data) <= 4096:
        return data
    garbled = bytearray(data)
    for at in range(len(data) - 8, 0, -8192):
        garbled[at] ^= 1
    return bytes(garbled)


@contextlib.contextmanager
def garbled(port: int, garble: Garble) -> Iterator[int]:
    """A port on which the server of `port` is, whose replies go through `garble`."""

    def pump(source: socket.socket, target: socket.socket, change: Garble) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(change(data))
        for end in (source, target):
            end.close()

    def loop() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", port))
                for ends in ((client, server, bytes), (server, client, garble)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=loop, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def retrieved(engine: Engine) -> int:
    kv = torch.zeros_like(KV)
    count = int(engine.retrieve(TOKENS, kv=kv).sum())
    assert torch.equal(kv[..., :count, :], KV[..., :count, :]) and not kv[..., count:, :].any()
    return count


@pytest.mark.parametrize("garble", [flipped, lambda data: b"$3\r\nabc\r\n" if len(data) > 4096 else data])
def test_what_is_good_for_others_stays(server: RedisServer, garble: Garble) -> None:
    def engine(port: int) -> Engine:
        tier = {"type": "redis", "url": f"redis://127.0.0.1:{port}", "prefix": "bad-line:", "timeout": "5s"}
        return Engine.open({"chunk_tokens": CHUNK, "tiers": [tier]}, SPEC)

    port = int(server.url.rpartition(":")[2])
    turned_bad = threading.Event()

    def line(data: bytes) -> bytes:
        return garble(data) if turned_bad.is_set() else data

    with engine(port) as good, garbled(port, line) as bad_port, engine(bad_port) as bad:
        good.store(TOKENS, kv=KV)
        assert good.flush()
        turned_bad.set()
        assert retrieved(bad) == 0
        assert retrieved(good) == 4 * CHUNK
        good.clear()
