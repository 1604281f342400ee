"""LMCache 0.5.6's own connectors to Redis and S3, told what to do by `lmcache_remote.py`. Runs in its own venv.

Takes orders from stdin, a JSON object in each line, and answers each with the seconds that it took.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

LAYERS, HEADS, HEAD_SIZE = 8, 8, 128
TOKEN_BYTES = 2 * LAYERS * HEADS * HEAD_SIZE * 2
VALUES = 32


class Peer:
    """One connector, one size of values, `callers` requests under way at most."""

    def __init__(self, order):
        tokens = order["bytes"] // TOKEN_BYTES
        room = 2.2 * VALUES * order["bytes"] / 2**30  # GiB: what is put, and what is got
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=tokens, save_unfull_chunk=False, local_cpu=False, max_local_cpu_size=room,
            extra_config={"save_chunk_meta": order["kind"] == "redis"},
        )  # fmt: skip
        metadata = LMCacheMetadata(
            model_name="bench", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=(LAYERS, 2, tokens, HEADS, HEAD_SIZE), role="worker", chunk_size=tokens,
        )  # fmt: skip
        self.cpu = LocalCPUBackend(config, metadata, dst_device="cpu")
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.callers, self.batched = order["callers"], order["batched"]
        self.connector = self.run(self.connect(order))
        self.keys = [CacheEngineKey("bench", 1, 0, 0x100 + number, torch.bfloat16) for number in range(VALUES)]
        self.values = []
        for number in range(VALUES):
            value = self.allocate()
            value.tensor.view(torch.uint8).random_(generator=torch.Generator().manual_seed(number))
            self.values.append(value)

    async def connect(self, order):
        url = order["url"]
        if order["kind"] == "resp":
            from lmcache.v1.storage_backend.connector.redis_connector import RESPConnector

            host, _, port = url.partition(":")
            return RESPConnector(host, int(port), self.loop, self.cpu, num_threads=self.callers)
        if order["kind"] == "redis":
            from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector

            return RedisConnector(f"redis://{url}", self.loop, self.cpu)
        from lmcache.v1.storage_backend.connector.s3_connector import S3Connector

        keys = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
        return S3Connector(f"s3://{url}", self.loop, self.cpu, 8, False, "us-east-1", False, True, *keys)

    def allocate(self):
        connector = self.connector
        value = self.cpu.allocate(connector.meta_shapes, connector.meta_dtypes, connector.meta_fmt)
        assert value is not None, "no room"
        return value

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    async def each(self, one):
        room = asyncio.Semaphore(self.callers)

        async def limited(number):
            async with room:
                return await one(number)

        return await asyncio.gather(*map(limited, range(VALUES)))

    def put(self):
        began = time.perf_counter()
        if self.batched:
            self.run(self.connector.batched_put(self.keys, self.values))
        else:
            self.run(self.each(lambda number: self.connector.put(self.keys[number], self.values[number])))
        return time.perf_counter() - began

    def get(self):
        began = time.perf_counter()
        if self.batched:
            found = self.run(self.connector.batched_get(self.keys))
        else:
            found = self.run(self.each(lambda number: self.connector.get(self.keys[number])))
        seconds = time.perf_counter() - began
        for value, got in zip(self.values, found, strict=True):
            assert got is not None, "not there"
            assert bytes(got.byte_array) == bytes(value.byte_array), "other bytes"
            got.ref_count_down()
        return seconds

    def close(self):
        if hasattr(self.connector, "client"):  # `close` of the connector waits for workers that it has cancelled
            self.loop.call_soon_threadsafe(self.connector.client.close)
        for value in self.values:
            value.ref_count_down()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        return 0.0


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    peer = None
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "open":
            peer, seconds = Peer(order), 0.0
        else:
            seconds = getattr(peer, order["do"])()
        print(json.dumps(seconds), file=answers, flush=True)


if __name__ == "__main__":
    main()
