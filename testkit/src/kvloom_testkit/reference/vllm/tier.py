"""A secondary tier of vLLM's offloading that keeps each chunk in a file of one directory, by the shortest way."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

_DIGEST_BYTES = 32


class DirectoryTier(SecondaryTierManager):
    """`path`: the directory."""

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, path: str,
        backpressure_detector: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.folder = Path(path) / self.fingerprint(offloading_spec.config)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.threads = ThreadPoolExecutor(1)
        self.lock = threading.Lock()
        self.done: list[JobResult] = []
        self.running = 0

    def fingerprint(self, config: Any) -> str:
        """A name for all that decides which bytes a chunk has, apart from its tokens."""
        what = config.model, config.cache, config.parallel, config.groups, config.kv_cache_layout, self.block_size_bytes
        return hashlib.sha256(json.dumps([str(one) for one in what]).encode()).hexdigest()[:16]

    def path(self, key: bytes) -> Path:
        """The file of a chunk. vLLM's hash covers the tokens up to its end, salt, adapter and images."""
        return self.folder / key.hex()

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Nothing is wanted."""
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Return whether there is a file."""
        return LookupResult.HIT if self.path(key).exists() else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Write files, in the background."""
        self.submit(job_metadata, self.store)

    def submit_load(self, job_metadata: Any) -> None:
        """Read files, in the background."""
        self.submit(job_metadata, self.load)

    def submit(self, job: Any, move: Callable[[bytes, memoryview], bool]) -> None:
        """Have chunks moved by the thread."""
        with self.lock:
            self.running += 1
        self.threads.submit(partial(self.run, job, move))

    def run(self, job: Any, move: Callable[[bytes, memoryview], bool]) -> None:
        """Move chunks, and note those that were."""
        good = [key for key, row in zip(job.keys, job.chunk_ids, strict=True) if move(key, self.row(int(row)))]
        with self.lock:
            self.done.append(JobResult(job.job_id, len(good) == len(job.keys), good))
            self.running -= 1

    def row(self, number: int) -> memoryview:
        """A chunk's bytes in host memory."""
        return self._primary_kv_view[number : number + 1].cast("B")

    def store(self, key: bytes, row: memoryview) -> bool:
        """Write a file under another name first, so that readers never see half of it."""
        draft = self.folder / f"{key.hex()}.{os.getpid()}"
        draft.write_bytes(hashlib.sha256(row).digest() + row)
        draft.replace(self.path(key))
        return True

    def load(self, key: bytes, row: memoryview) -> bool:
        """Fill a row from its file; false if it is gone or damaged."""
        try:
            data = memoryview(self.path(key).read_bytes())
        except OSError:
            return False
        digest, chunk = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if len(chunk) != len(row) or hashlib.sha256(chunk).digest() != digest:
            self.path(key).unlink(missing_ok=True)
            return False
        row[:] = chunk
        return True

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that are over, once each."""
        with self.lock:
            done, self.done = self.done, []
        return done

    def has_pending_work(self) -> bool:
        """Return whether a job is not over or not told."""
        with self.lock:
            return bool(self.running or self.done)

    def drain_jobs(self) -> None:
        """Wait for the thread."""
        self.threads.submit(lambda: None).result()

    def shutdown(self) -> None:
        """End the thread."""
        self.threads.shutdown()
