"""kvloom's own publisher speaks as vLLM's does: the same bytes, and the same subscriber understands both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

vllm = pytest.importorskip("vllm")

import msgspec  # noqa: E402
import torch  # noqa: E402
import zmq  # noqa: E402
from vllm.distributed import kv_events as theirs  # noqa: E402

from kvloom import Engine  # noqa: E402
from kvloom_events_zmq import wire as ours  # noqa: E402
from kvloom_events_zmq.publisher import Publisher, Settings  # noqa: E402
from kvloom_testkit.faults import free_port  # noqa: E402
from kvloom_testkit.subjects import SPEC  # noqa: E402

SECONDS = 20
STORED: dict[str, Any] = {
    "block_hashes": [1, 2**64 - 1], "parent_block_hash": 7, "token_ids": [0, 5, 151_000, 3], "block_size": 2,
    "lora_id": None, "medium": "CPU", "lora_name": None,
}  # fmt: skip
REMOVED: dict[str, Any] = {"block_hashes": [b"x" * 32], "medium": "STORAGE"}


@pytest.mark.parametrize("more", [{}, {"ownership": "disk"}, {"extra_keys": [["salt"], None]}])
@pytest.mark.parametrize("rank", [None, 0, 3])
def test_events_are_the_same_bytes(more: dict[str, Any], rank: int | None) -> None:
    def batch(module: Any, cls: Any) -> bytes:
        removed = {name: value for name, value in more.items() if name == "ownership"}
        events = [
            module.BlockStored(**STORED, **more),
            module.BlockStored(**STORED | {"parent_block_hash": None}),
            module.BlockRemoved(**REMOVED, **removed),
            module.AllBlocksCleared(),
        ]
        return msgspec.msgpack.encode(cls(ts=1.5, events=events, data_parallel_rank=rank))

    assert batch(ours, ours.Batch) == batch(theirs, theirs.KVEventBatch)


def our_publisher(endpoint: str, replay: str) -> tuple[Callable[[Any], None], Callable[[], None]]:
    settings = Settings(endpoint, replay, "kv@pod", 100, 100, 1, 100, 0)
    publisher = Publisher(settings)
    return (lambda number: publisher.publish([ours.BlockRemoved([number], "CPU")])), publisher.close


def their_publisher(endpoint: str, replay: str) -> tuple[Callable[[Any], None], Callable[[], None]]:
    _, _, port = endpoint.rpartition(":")
    _, _, second = replay.rpartition(":")
    publisher = theirs.ZmqEventPublisher(0, f"tcp://*:{port}", f"tcp://*:{second}", 100, topic="kv@pod")

    def publish(number: int) -> None:
        publisher.publish(
            theirs.KVEventBatch(ts=1.0, events=[theirs.BlockRemoved(block_hashes=[number], medium="CPU")])
        )

    return publish, publisher.shutdown


def frames_of(publish: Callable[[int], None], endpoint: str, replay: str) -> Iterator[list[bytes]]:
    """A subscriber's frames for the events 0 to 4, live and replayed; with numbers in place of times."""
    with zmq.Context() as context:
        sub, asking = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        try:
            for one, place in ((sub, endpoint), (asking, replay)):
                one.rcvtimeo = 1000 * SECONDS
                one.connect(place)
            sub.subscribe(b"kv@")
            publish(0)
            count = 1
            while not sub.poll(100):  # until the subscription is there
                publish(0)
                count += 1
            for number in (1, 2, 3, 4):
                publish(number)
            decoder = msgspec.msgpack.Decoder(type=theirs.KVEventBatch)
            live = []
            while not live or live[-1][3] != 4:
                topic, seq, payload = sub.recv_multipart()
                batch = decoder.decode(payload)
                assert batch.data_parallel_rank == 0
                (event,) = batch.events
                live.append((topic, len(seq), int.from_bytes(seq, "big"), event.block_hashes[0]))
            last = live[-1][2]
            yield [(topic, size, number - last, block) for topic, size, number, block in live if block]
            asking.send_multipart((b"", (last - 2).to_bytes(8, "big")))
            told = []
            while not told or told[-1][2] != (-1).to_bytes(8, "big", signed=True):
                told.append(asking.recv_multipart())
            *batches, end = told
            yield [
                (empty, topic, int.from_bytes(seq, "big") - last, decoder.decode(payload).events[0].block_hashes)
                for empty, topic, seq, payload in batches
            ]
            yield end
        finally:
            context.destroy(linger=0)


def test_a_subscriber_gets_the_same_frames_from_both() -> None:
    seen = []
    for make in (our_publisher, their_publisher):
        endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        publish, close = make(endpoint, replay)
        try:
            seen.append([*frames_of(publish, endpoint, replay)])
        finally:
            close()
    assert seen[0] == seen[1]
    assert [block for *_, block in seen[0][0]] == [1, 2, 3, 4]


def test_what_an_engine_publishes_is_what_vllm_reads() -> None:
    endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    config = {
        "connector": "plain",
        "chunk_tokens": 16,
        "tiers": [{"type": "memory", "capacity": "8MiB"}],
        "observers": [{"type": "events_zmq", "endpoint": endpoint, "replay_endpoint": replay}],
    }
    tokens = torch.arange(40)
    with Engine.open(config, SPEC) as engine, zmq.Context() as context:
        engine.store(tokens, kv=torch.ones(SPEC.blob_shape(40), dtype=SPEC.torch_dtype))
        engine.clear()
        assert engine._events.flush(SECONDS)
        asking = context.socket(zmq.DEALER)
        asking.rcvtimeo = 1000 * SECONDS
        asking.connect(replay)
        events: list[Any] = []
        while not events or not isinstance(events[-1], theirs.AllBlocksCleared):
            events = []
            asking.send_multipart((b"", bytes(8)))
            while (payload := asking.recv_multipart()[-1]) != b"":
                events += msgspec.msgpack.decode(payload, type=theirs.KVEventBatch).events
        context.destroy(linger=0)
        stored = [one for one in events if isinstance(one, theirs.BlockStored)]
        assert [one.token_ids for one in stored] == [tokens[:16].tolist(), tokens[16:32].tolist()]
        assert stored[1].parent_block_hash == stored[0].block_hashes[0] and stored[0].medium == theirs.MEDIUM_CPU
        removed = {block for one in events if isinstance(one, theirs.BlockRemoved) for block in one.block_hashes}
        assert removed == {block for one in stored for block in one.block_hashes}
