"""`type: faulty`: a disk whose calls are disturbed as a file says, so that a test can change its mind from outside.

The file holds JSON: `{"get": {"delay": 0.5}}`, or `{"get": {"hang": 30}}`, `{"get": {"fail": true}}`, `{"put": ...}`.
`{"put": {"dies": 3}}` kills the process in the middle of the fourth blob.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from kvloom import StorageBackend, hookimpl
from kvloom_backend_disk.backend import DiskBackend


class FaultyBackend(DiskBackend):
    type = "faulty"

    class Config(DiskBackend.Config):
        faults: Path

    _puts = itertools.count()

    def _fault(self, verb: str) -> dict[str, Any]:
        try:
            return dict(json.loads(self.config.faults.read_text()).get(verb, {}))
        except OSError:
            return {}

    def _disturb(self, verb: str) -> None:
        fault = self._fault(verb)
        time.sleep(fault.get("delay", 0) or fault.get("hang", 0))
        if fault.get("fail"):
            raise OSError(5, f"{verb}: as the test says")

    def get(self, key: str) -> Any:
        self._disturb("get")
        return super().get(key)

    def get_into(self, key: str, sink: Any) -> Any:
        self._disturb("get")
        return super().get_into(key, sink)

    def get_many_into(self, requests: Any, done: Any) -> None:
        self._disturb("get")
        super().get_many_into(requests, done)

    def get_range(self, *args: Any, **kwargs: Any) -> Any:
        self._disturb("get")
        return super().get_range(*args, **kwargs)

    def get_many(self, *args: Any, **kwargs: Any) -> Any:
        self._disturb("get")
        return super().get_many(*args, **kwargs)

    def put(self, key: str, blob: Any) -> None:
        self._disturb("put")
        dies = self._fault("put").get("dies")
        if dies is not None and next(self._puts) >= dies:
            _, file = self._scratch.open()
            whole = b"".join(blob)
            os.write(file, whole[: len(whole) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        super().put(key, blob)

    def put_many(self, requests: Any, done: Any) -> None:
        StorageBackend.put_many(self, requests, done)  # by `put` of each, however the disk does it

    def put_over(self, *args: Any) -> None:
        self._disturb("put")
        super().put_over(*args)

    def contains(self, key: str) -> bool:
        self._disturb("contains")
        return super().contains(key)

    def contains_many(self, keys: Any) -> Any:
        self._disturb("contains")
        return super().contains_many(keys)


@hookimpl
def kvloom_storage_backends() -> list[type[FaultyBackend]]:
    return [FaultyBackend]
