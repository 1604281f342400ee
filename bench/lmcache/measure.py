"""LMCache 0.5.6 on a CPU, with the operations that `core_path.py` and `disk_path.py` measure. Runs in its own venv.

There is no paged engine here: a connector of a few lines copies slices of one tensor, as the plain connector does.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import time
from pathlib import Path

os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase

LAYERS, CHUNK, HIDDEN, CHUNKS = 32, 256, 1024, 16
TOKENS = CHUNK * CHUNKS
GIGABYTES = 2 * LAYERS * TOKENS * HIDDEN * 2 / 1e9


class SliceConnector(GPUConnectorInterface):
    def get_shape(self, num_tokens):
        return torch.Size([2, LAYERS, num_tokens, HIDDEN])

    def from_gpu(self, memory_obj, start, end, **kwargs):
        memory_obj.tensor.copy_(kwargs["kvcaches"][:, :, start:end, :])

    def to_gpu(self, memory_obj, start, end, **kwargs):
        kwargs["kvcaches"][:, :, start:end, :].copy_(memory_obj.tensor)

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs, starts, ends, **kwargs):
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)


METADATA = LMCacheMetadata(
    model_name="test_model", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
    kv_dtype=torch.bfloat16, kv_shape=(LAYERS, 2, CHUNK, HIDDEN // 128, 128), role="worker",
)  # fmt: skip


def open_engine(name, **config):
    made = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, save_unfull_chunk=False, **config)
    engine = LMCacheEngineBuilder.get_or_create(
        name, made, METADATA, SliceConnector(), mock_up_broadcast_fn, mock_up_broadcast_object_fn
    )
    engine.post_init()
    return engine


def taken(run, times):
    seconds = []
    for index in range(times):
        began = time.perf_counter()
        run(index)
        seconds.append(time.perf_counter() - began)
    return seconds


def tokens_of(count, seed):
    return torch.randint(0, 128000, (count,), generator=torch.Generator().manual_seed(seed))


def rate(seconds):
    return round(GIGABYTES / statistics.median(seconds), 3)


def memory(results, prompts, source, target):
    began = time.perf_counter()
    engine = open_engine("cpu", local_cpu=True, max_local_cpu_size=8.0)
    engine.store(prompts[0], kvcaches=source)
    results["open, 8 GiB, to the end of the first store (s)"] = round(time.perf_counter() - began, 3)
    times = len(prompts) - 1
    taken(lambda i: engine.store(prompts[i + 1], kvcaches=source), times)
    engine.clear()
    results["store into memory (GB/s)"] = rate(taken(lambda i: engine.store(prompts[i + 1], kvcaches=source), times))
    again = taken(lambda i: engine.store(prompts[1], kvcaches=source), 5)
    results["store again what is cached (ms)"] = round(statistics.median(again) * 1e3, 3)
    back = taken(lambda i: engine.retrieve(prompts[i + 1], kvcaches=target), times)
    results["retrieve from memory (GB/s)"] = rate(back)
    assert torch.equal(source, target)
    look = statistics.median(taken(lambda i: engine.lookup(prompts[1]), 101))
    results["lookup, all hit (us a chunk)"] = round(look / CHUNKS * 1e6, 2)
    LMCacheEngineBuilder.destroy("cpu")


def disk(results, prompts, source, target, folder, *, direct):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    how = "O_DIRECT" if direct else "buffered"
    engine = open_engine(
        "disk", local_cpu=False, max_local_cpu_size=4.0, local_disk=str(folder), max_local_disk_size=12.0,
        extra_config={"use_odirect": direct},
    )  # fmt: skip
    backend = engine.storage_manager.storage_backends["LocalDiskBackend"]

    def store(prompt):
        engine.store(prompt, kvcaches=source)
        while backend.disk_worker.put_tasks:
            time.sleep(0.001)

    def cold(index):
        nonlocal target
        engine.retrieve(prompts[index + 1], kvcaches=target)

    store(prompts[0])
    times = len(prompts) - 1
    results[f"disk {how}: store until written (GB/s)"] = rate(taken(lambda i: store(prompts[i + 1]), times))
    results[f"disk {how}: retrieve warm (GB/s)"] = rate(
        taken(lambda i: engine.retrieve(prompts[i + 1], kvcaches=target), times)
    )
    assert torch.equal(source, target)
    seconds = []
    for index in range(times):
        os.sync()
        try:
            Path("/proc/sys/vm/drop_caches").write_text("3")
        except OSError:
            break
        seconds += taken(lambda _, index=index: cold(index), 1)
    if seconds:
        results[f"disk {how}: retrieve cold (GB/s)"] = rate(seconds)
    LMCacheEngineBuilder.destroy("disk")
    shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    results = {}
    many = 1_000_000 // CHUNK * CHUNK
    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, save_unfull_chunk=False)
    database = ChunkedTokenDatabase(config, METADATA)
    tokens = tokens_of(many, 1)
    seconds = statistics.median(taken(lambda i: list(database.process_tokens(tokens, make_key=True)), 5))
    results["keys for a million tokens, builtin hash (Mtok/s)"] = round(many / seconds / 1e6, 1)
    source = torch.empty(2, LAYERS, TOKENS, HIDDEN, dtype=torch.bfloat16).normal_()
    target = torch.zeros_like(source)
    prompts = [tokens_of(TOKENS, 100 + index) for index in range(args.repeats + 1)]
    memory(results, prompts, source, target)
    gc.collect()
    for direct in (False, True):
        disk(results, prompts, source, target, args.dir / "lmcache-bench", direct=direct)
        gc.collect()
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    os._exit(0)  # its threads do not end by themselves


main()
