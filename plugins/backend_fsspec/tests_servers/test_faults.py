"""An engine over a real S3 server, while the server, the network and other clients do their worst.

Every byte that is served is compared. What failed is a miss, and is counted; afterwards everything is found again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvloom import BackendError, Engine, KVSpec
from kvloom_backend_fsspec.testing import CephRGW, s3_client
from kvloom_testkit.backends.doubles import put_all
from kvloom_testkit.faults import TcpProxy

SPEC = KVSpec(model="tiny", num_layers=2, num_kv_heads=2, head_size=64, dtype="bfloat16")
CHUNK, CHUNKS, PROMPTS = 32, 4, 4
DEADLINE_SECONDS = 0.5
TOKENS = [torch.arange(CHUNK * CHUNKS) + 1000 * number for number in range(PROMPTS)]
KV = [
    torch.randn(SPEC.blob_shape(CHUNK * CHUNKS), generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
    for number in range(PROMPTS)
]
HANGS_SECONDS = 30.0
Tally = Callable[..., None]


@dataclass
class Served:
    chunks: int = 0
    hits: int = 0
    incomplete: int = 0
    """Number of retrieves that did not return everything."""


@pytest.fixture
def bucket(rgw: CephRGW, new_bucket: Callable[..., str]) -> str:
    return new_bucket(rgw)


@pytest.fixture
def open_engine(bucket: str) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def open(endpoint: str, **tier: Any) -> Engine:
        # A busy machine may take seconds for the first write, which opening waits for.
        settings = {"type": "fsspec", "url": f"s3://{bucket}/kv", "allow_http": True, "timeout": 10.0, **tier}
        settings = {"deadline": f"{int(DEADLINE_SECONDS * 1000)}ms", "options": {"endpoint": endpoint}, **settings}
        tiers = [{"type": "memory", "capacity": "8MiB"}, settings]
        engines.append(Engine.open({"chunk_tokens": CHUNK, "connector": "plain", "tiers": tiers}, SPEC))
        return engines[-1]

    yield open
    for engine in engines:
        engine.close()


@pytest.fixture
def proxied(rgw: CephRGW) -> Iterator[TcpProxy]:
    with TcpProxy("127.0.0.1", rgw.port) as proxy:
        yield proxy


def store(engine: Engine) -> None:
    for tokens, kv in zip(TOKENS, KV, strict=True):
        engine.store(tokens, kv=kv)
    assert engine.flush(HANGS_SECONDS)


def forget(engine: Engine) -> None:
    """Empty the memory tier, so that what is served comes from the store."""
    memory: Any = engine.tiers["memory"]
    until = time.monotonic() + HANGS_SECONDS
    while memory.used_bytes:
        memory.remove(memory.chunks())
        assert time.monotonic() < until, "a lease or a reservation was lost"
        time.sleep(0.01)


def serve(engine: Engine, served: Served) -> int:
    """Retrieve every prompt; asserts that what came is right and the rest untouched. How many chunks came."""
    forget(engine)
    hits = 0
    for tokens, kv in zip(TOKENS, KV, strict=True):
        got = torch.zeros_like(kv)
        began = time.monotonic()
        mask = engine.retrieve(tokens, kv=got)
        assert time.monotonic() - began < HANGS_SECONDS, "a caller waited for the store"
        assert torch.equal(got[:, :, mask], kv[:, :, mask]) and not got[:, :, ~mask].any(), "wrong bytes"
        hits += int(mask.sum()) // CHUNK
        served.incomplete += not mask.all()
    served.chunks += CHUNKS * PROMPTS
    served.hits += hits
    return hits


def serves_again(engine: Engine, served: Served) -> None:
    """Everything that is stored is found, once the tier's pause is over."""
    until = time.monotonic() + 2 * HANGS_SECONDS
    while True:
        store(engine)
        if serve(engine, served) == CHUNKS * PROMPTS:
            return
        assert time.monotonic() < until, "it never served again"
        time.sleep(0.1)


def count(engine: Engine, name: str) -> int:
    return sum(totals.count for key, totals in engine.counters().items() if key.name == name)


NETWORKS: dict[str, dict[str, Any]] = {
    "slow": {"delay_seconds": 0.02},
    "too slow": {"delay_seconds": 2.0},
    "cut in the header": {"cut_after_bytes": 100},
    "cut in the blob": {"cut_after_bytes": 30_000},
    "flips in the header": {"flip_at": 60},
    "flips in the blob": {"flip_at": 20_000},
    "black hole": {"black_hole": True},
}


@pytest.mark.parametrize("fault", NETWORKS, ids=NETWORKS.get and str)
def test_a_bad_network(
    fault: str, rgw: CephRGW, open_engine: Callable[..., Engine], proxied: TcpProxy, tally: Tally
) -> None:
    served = Served()
    serves_again(open_engine(rgw.endpoint), Served())
    for name, value in NETWORKS[fault].items():
        setattr(proxied.answers, name, value)
    # Bytes are counted from the beginning of a connection: a new engine makes new ones.
    engine = open_engine(f"http://127.0.0.1:{proxied.port}", write="never")
    longest = 0.0
    for _ in range(3):
        began = time.monotonic()
        serve(engine, served)
        longest = max(longest, time.monotonic() - began)
    for name in NETWORKS[fault]:
        setattr(proxied.answers, name, type(proxied.answers).__dataclass_fields__[name].default)
    serves_again(engine, served)
    assert count(engine, "missed") >= served.incomplete
    # A bit that flips once is found, and the blob read again; what was cut is asked for again from there.
    if fault in ("too slow", "cut in the header", "black hole"):
        assert served.incomplete and count(engine, "tier_error")
    tally(
        reads=served.chunks, hits=served.hits, connections=proxied.connections, longest_round_in_ms=int(1000 * longest)
    )


class Callers:
    """Threads that retrieve and store all the while, and look at every byte."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.calls, self.longest, self.errors = engine, 0, 0.0, list[BaseException]()
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(seed,), daemon=True) for seed in range(3)]
        for thread in self._threads:
            thread.start()

    def _work(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not self._done.is_set():
                number = rng.randrange(PROMPTS)
                began = time.monotonic()
                if rng.random() < 0.3:
                    self.engine.store(TOKENS[number], kv=KV[number])
                else:
                    got = torch.zeros_like(KV[number])
                    mask = self.engine.retrieve(TOKENS[number], kv=got)
                    assert torch.equal(got[:, :, mask], KV[number][:, :, mask]) and not got[:, :, ~mask].any()
                self.longest = max(self.longest, time.monotonic() - began)
                self.calls += 1
        except BaseException as error:
            self.errors.append(error)

    def finish(self) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(HANGS_SECONDS)
            assert not thread.is_alive(), "a caller hangs"
        assert not self.errors, self.errors


def test_threads_come_back_from_a_frozen_server(rgw: CephRGW, open_engine: Callable[..., Engine]) -> None:
    engine = open_engine(rgw.endpoint, timeout=1.0)
    store(engine)
    tier: Any = engine.tiers["fsspec"]
    rgw.freeze()
    try:
        serve(engine, Served())
        until = time.monotonic() + 10 * 1.0
        while tier.abandoned_calls:
            assert time.monotonic() < until, "a thread waits for ever"
            time.sleep(0.05)
    finally:
        rgw.thaw()
    serves_again(engine, Served())


def test_objects_vanish_and_change_behind_our_back(
    rgw: CephRGW, bucket: str, open_engine: Callable[..., Engine], tally: Tally
) -> None:
    served, client, rng = Served(), s3_client(rgw.endpoint), random.Random(3)
    engine = open_engine(rgw.endpoint)
    store(engine)
    done = threading.Event()
    counts = {"deleted": 0, "cut": 0, "flipped": 0, "swapped": 0}

    def vandal() -> None:
        while not done.is_set():
            names = [one["Key"] for one in client.list_objects_v2(Bucket=bucket, Prefix="kv/").get("Contents", [])]
            names = [name for name in names if "/spec/" not in name]
            if len(names) < 2:
                time.sleep(0.01)
                continue
            what, name = rng.choice(list(counts)), rng.choice(names)
            try:
                body = bytearray(client.get_object(Bucket=bucket, Key=name)["Body"].read())
                if what == "flipped":
                    body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
                elif what == "swapped":
                    body = bytearray(client.get_object(Bucket=bucket, Key=rng.choice(names))["Body"].read())
                if what == "deleted":
                    client.delete_object(Bucket=bucket, Key=name)
                else:
                    cut = body[: rng.randrange(len(body))] if what == "cut" else body
                    client.put_object(Bucket=bucket, Key=name, Body=bytes(cut))
                counts[what] += 1
            except client.exceptions.NoSuchKey:
                pass

    thread = threading.Thread(target=vandal, daemon=True)
    thread.start()
    began = time.monotonic()
    while (lasted := time.monotonic() - began) < 5 or (
        lasted < HANGS_SECONDS and not (all(counts.values()) and count(engine, "corrupt"))
    ):
        serve(engine, served)
        store(engine)
    done.set()
    thread.join(HANGS_SECONDS)
    assert all(counts.values()), counts
    assert count(engine, "corrupt") >= 1
    serves_again(engine, served)
    tally(reads=served.chunks, hits=served.hits, **counts)


def test_a_full_bucket_is_a_dropped_write_and_hits_go_on(
    rgw: CephRGW, open_engine: Callable[..., Engine], s3: Any, bucket: str, tally: Tally
) -> None:
    served = Served()
    engine = open_engine(rgw.endpoint)
    store(engine)
    rgw.admin("quota", "set", "--quota-scope=bucket", f"--bucket={bucket}", "--max-objects=1")
    rgw.admin("quota", "enable", "--quota-scope=bucket", f"--bucket={bucket}")
    backend = s3(rgw, bucket)
    with pytest.raises(BackendError, match="the store is full: raise its quota"):
        put_all(backend, ((f"more/{number}", [bytes(1000)]) for number in range(100)))
    engine.store(TOKENS[0] + 7, kv=KV[0])
    assert engine.flush(HANGS_SECONDS)
    assert count(engine, "tier_error") >= 1
    assert serve(engine, served) == CHUNKS * PROMPTS, "what is there is served"
    rgw.admin("quota", "disable", "--quota-scope=bucket", f"--bucket={bucket}")
    until = time.monotonic() + HANGS_SECONDS
    while True:
        try:
            backend.put("more/later", [b"blob"])
            break
        except BackendError:
            assert time.monotonic() < until, "it never took a blob again"
            time.sleep(0.2)
    backend.close()
    serves_again(engine, served)
    tally(reads=served.chunks, hits=served.hits)


def test_two_engines_on_one_bucket_find_each_others_kv(
    rgw: CephRGW, open_engine: Callable[..., Engine], tally: Tally
) -> None:
    served = Served()
    one, other = open_engine(rgw.endpoint, capacity="100MiB"), open_engine(rgw.endpoint, capacity="100MiB")
    both = [threading.Thread(target=store, args=(engine,)) for engine in (one, other)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(HANGS_SECONDS)
    for engine in (one, other):
        serves_again(engine, served)
    assert sum(health.evicts for engine in (one, other) for health in engine.health().tiers[1:]) == 1
    tally(reads=served.chunks, hits=served.hits)


# Last: after it was killed, the gateway takes half a minute until it makes a bucket again.
@pytest.mark.parametrize("fault", ["frozen", "killed"])
def test_the_server_stops_in_the_middle(
    fault: str, rgw: CephRGW, open_engine: Callable[..., Engine], tally: Tally
) -> None:
    served = Served()
    engine = open_engine(rgw.endpoint)
    store(engine)
    calls = 0
    longest = 0.0
    for turn in range(2):
        callers = Callers(engine)
        forget_until = time.monotonic() + 0.2 + 0.1 * turn
        while time.monotonic() < forget_until:
            engine.tiers["memory"].remove(engine.tiers["memory"].chunks())  # type: ignore[attr-defined]
            time.sleep(0.01)
        rgw.freeze() if fault == "frozen" else rgw.kill()
        began = time.monotonic()
        while (lasted := time.monotonic() - began) < 4 * DEADLINE_SECONDS or (
            lasted < HANGS_SECONDS and not count(engine, "tier_error")
        ):
            engine.tiers["memory"].remove(engine.tiers["memory"].chunks())  # type: ignore[attr-defined]
            time.sleep(0.02)
        rgw.thaw() if fault == "frozen" else rgw.restart()
        callers.finish()
        calls, longest = calls + callers.calls, max(longest, callers.longest)
        serves_again(engine, served)
    assert count(engine, "tier_error") >= 1
    assert longest < HANGS_SECONDS
    tally(calls=calls, longest_call_in_ms=int(1000 * longest), reads_afterwards=served.chunks)
