"""The common part of both buffers: a suitable backend, room, waiting with a deadline, and counts."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import random
import re
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from kvloom import (
    BackendError,
    Buffer,
    Buffers,
    ByteSize,
    ConfigError,
    Duration,
    Registry,
    StorageBackend,
    envelope,
    get_at_most,
    uninterrupted,
)
from kvloom_connector_vllm.buffers.room import Room, Until

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.001, 0.05


def vllm_base(name: str) -> type[Any]:
    """vLLM's class of that name where this vLLM still has it, else `object`. vLLM is not imported to find out."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("vllm")
        for place in (spec.submodule_search_locations if spec else None) or ():
            if (Path(place) / "distributed/kv_transfer/kv_lookup_buffer/base.py").is_file():
                module = importlib.import_module("vllm.distributed.kv_transfer.kv_lookup_buffer.base")
                found: type[Any] = getattr(module, name, object)
                return found
    return object


class BufferOnBackend:
    """A buffer on a storage backend; any number of threads and processes may have the same one open.

    backend: an instance, which stays the caller's to close, or its block as in YAML (`{"type": "disk", "path": ...}`).
    It must create keys exclusively and list them, and must not evict. capacity: bytes of all that is in the buffer, in
    whichever process it was put there, or text such as `4GiB`. timeout: seconds that a call may wait, or text such as
    `30s`. name: tells buffers on one store apart. abandoned: seconds after which what a process had begun and not ended
    counts as left behind by its death. Raises ConfigError if a buffer cannot work like that.
    """

    def __init__(
        self, backend: StorageBackend | Mapping[str, Any], *, capacity: int | str, timeout: float | str = 30.0,
        name: str, abandoned: float | str = 600.0,
    ) -> None:  # fmt: skip
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError("name", f"{name!r} cannot be part of a key; use up to 64 of A-Z a-z 0-9 . _ -")
        self.capacity = _positive("capacity", ByteSize, capacity)
        self.timeout = _positive("timeout", Duration, timeout, zero=True)
        self._abandoned = _positive("abandoned", Duration, abandoned)
        self._owns = not isinstance(backend, StorageBackend)
        self._backend = _opened(backend)
        self._name = name
        self._changed = threading.Condition()
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._room = Room(
            self._backend, name, kept=f"{name}/{self._part}/", capacity=self.capacity, abandoned=self._abandoned
        )

    _part = ""
    """The prefix of its entries in the store, after the buffer's name."""

    def counts(self) -> dict[str, int]:
        """Counts in this process so far, by the names that the methods give."""

        def copied() -> dict[str, int]:
            with self._changed:
                return dict(self._counts)

        return uninterrupted(copied, leave=True)

    def close(self) -> None:
        """Release the store and all waiting threads. The content stays. Idempotent."""
        uninterrupted(self._close, leave=True)

    def _close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._owns:
            self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _put(self, key: str, blob: Buffers, *, until: Until) -> None:
        """Keep `blob` once there is room. Raises DeadlineExceeded, ValueError if there can never be, BackendError."""
        self._check_open()
        nbytes = sum(memoryview(buffer).nbytes for buffer in blob)
        try:
            with self._room.reserved(nbytes, replacing=key, wait=lambda pause: self._wait(until, pause), until=until):
                self._check_open()
                self._backend.put(key, blob)
        except (BackendError, ValueError):
            self._count("refused")
            raise
        except Exception as error:
            self._count("failed")
            raise BackendError(f"could not keep {nbytes} bytes: {error}") from error
        self._count("inserted")
        self._notify()

    def _content(self, place: str) -> Buffer | None:
        """A blob, None if there is none. Raises CorruptBlobError, before it is read, if no entry is that long."""
        return get_at_most(self._backend, place, self.capacity + envelope.MAX_HEADER_BYTES)

    def _wait(self, until: Until, pause: float) -> float | None:
        """Wait until something may have changed. How long to wait next; None when there is no more time.

        pause: what the last call returned, at first 0. Raises BackendError if the buffer was closed.
        """
        pause = min(max(2 * pause, _SHORTEST_SECONDS), _LONGEST_SECONDS)
        with self._changed:
            self._check_open()
            left = until.left()
            if left <= 0:
                return None
            # Other processes cannot be heard, so it is looked again; not all of them at the same time.
            self._changed.wait(min(left, pause * random.uniform(0.5, 1.0)))
            self._check_open()
        return pause

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _count(self, what: str, number: int = 1) -> None:
        with self._changed:
            self._counts[what] += number

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError("the buffer is closed")


def _positive(path: str, kind: Any, value: Any, *, zero: bool = False) -> Any:
    try:
        parsed = TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ConfigError(path, _first(error)[1]) from error
    if parsed < 0 or (parsed == 0 and not zero):
        raise ConfigError(path, f"must be {'0 or more' if zero else 'more than 0'}, not {value!r}")
    return parsed


def _opened(backend: StorageBackend | Mapping[str, Any]) -> StorageBackend:
    if isinstance(backend, StorageBackend):
        _check_fit(type(backend))
        return backend
    if not isinstance(backend, Mapping) or not isinstance(backend.get("type"), str):
        raise ConfigError("backend", "expected a StorageBackend or a block with a `type`, such as {type: disk}")
    settings = {key: value for key, value in backend.items() if key != "type"}
    cls = Registry.discover().get("backend", backend["type"])
    _check_fit(cls)
    try:
        opened: StorageBackend = cls(cls.Config.model_validate(settings))
    except ValidationError as error:
        place, text = _first(error)
        raise ConfigError(".".join(["backend", *place]), text) from error
    except (ValueError, OSError) as error:
        raise ConfigError("backend", str(error)) from error
    try:
        opened.check_writable()
    except (ValueError, OSError) as error:
        opened.close()
        raise ConfigError("backend", str(error)) from error
    return opened


def _check_fit(cls: type[StorageBackend]) -> None:
    """Raise ConfigError unless entries on such a backend can be counted, kept and taken once."""
    if cls.create is StorageBackend.create:
        problem = "cannot create a key exclusively, so that two takers could get one entry"
    elif cls.scan is StorageBackend.scan:
        problem = "cannot list its keys, so that entries could not be found"
    elif cls.bounded:
        problem = "evicts by itself, so that entries, and the marks of who took them, could vanish"
    else:
        return
    raise ConfigError("backend", f"{cls.type!r} {problem}; use one that implements `create` and `scan` and keeps all")


def _first(error: ValidationError) -> tuple[list[str], str]:
    first = error.errors()[0]
    text = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
    return [str(part) for part in first["loc"]], text
