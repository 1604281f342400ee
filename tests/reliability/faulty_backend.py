"""A storage backend whose k-th call fails: before it did anything, half-way, or after it did all of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from kvloom import Buffer, Buffers, Config, Entry, Sink, StorageBackend, WriteDone, hookimpl, join

When = Literal["before", "half", "after"]
T = TypeVar("T")


class Shelf:
    """State shared by the backends of one name, also over restarts: the blobs, and the calls that fail."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.calls = 0
        self.verbs: list[str] = []
        self.fails: Callable[[int], bool] = lambda call: False
        self.when: When = "before"
        self._lock = threading.Lock()

    def next_fails(self, verb: str) -> bool:
        with self._lock:
            self.calls += 1
            self.verbs.append(verb)
            return self.fails(self.calls)

    @property
    def bytes(self) -> int:
        """Size of the blobs in whole pages."""
        return sum(
            -(-len(blob) // 4096) * 4096 for key, blob in list(self.blobs.items()) if not key.startswith("spec/")
        )


class FaultyBackend(StorageBackend):
    """Blobs in a dictionary that outlives it."""

    type = "faulty"
    persistent = True
    shared = True
    shelves: ClassVar[dict[str, Shelf]] = {}

    class Config(Config):
        shelf: str = "default"

    def __init__(self, config: Any, spec: object = None) -> None:
        super().__init__(config)
        self.shelf = self.shelves.setdefault(config.shelf, Shelf())

    def _call(self, verb: str, act: Callable[[], T], half: Callable[[], object] = lambda: None) -> T:
        fails, when = self.shelf.next_fails(verb), self.shelf.when
        if fails and when == "half":
            half()
        if fails and when != "after":
            raise OSError(5, f"Input/output error in {verb}")
        result = act()
        if fails:
            raise OSError(5, f"Input/output error after {verb}")
        return result

    def put(self, key: str, blob: Buffers) -> None:
        self._call("put", lambda: self.shelf.blobs.__setitem__(key, join(blob)))

    def get(self, key: str) -> Buffer | None:
        return self._call("get", lambda: self.shelf.blobs.get(key))

    def contains(self, key: str) -> bool:
        return self._call("contains", lambda: key in self.shelf.blobs)

    def delete(self, key: str) -> None:
        self._call("delete", lambda: self.shelf.blobs.pop(key, None))

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        found = [Entry(key, -(-len(blob) // 4096) * 4096, 0.0) for key, blob in list(self.shelf.blobs.items())]
        mine = [entry for entry in found if entry.key.startswith(prefix)]
        fails = self.shelf.next_fails("scan")
        if fails and self.shelf.when != "before":
            yield from mine[: len(mine) // 2]
        if fails:
            raise OSError(5, "Input/output error in scan")
        yield from mine

    def get_into(self, key: str, sink: Sink) -> bool:
        def fill(upto: Callable[[int], int]) -> bool:
            blob = self.shelf.blobs.get(key)
            if blob is None:
                return False
            size = upto(len(blob))
            sink.reserve(len(blob))[:size] = blob[:size]
            sink.filled(size)
            return True

        return self._call("get_into", lambda: fill(lambda size: size), lambda: fill(lambda size: size // 2))

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        def fill() -> bool:
            part = self.shelf.blobs.get(key, b"")[offset : offset + len(into)]
            if len(part) == len(into):
                into[:] = part
            return len(part) == len(into)

        return self._call("get_range", fill)

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        def keep(upto: int) -> None:
            for number, (key, blob) in enumerate(requests[:upto]):
                self.shelf.blobs[key] = join(blob)
                done(number, None)

        self._call("put_many", lambda: keep(len(requests)), lambda: keep(len(requests) // 2))

    def get_many(self, keys: Sequence[str]) -> list[Buffer | None]:
        return self._call("get_many", lambda: [self.shelf.blobs.get(key) for key in keys])

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        return self._call("contains_many", lambda: [key in self.shelf.blobs for key in keys])

    def delete_many(self, keys: Sequence[str]) -> None:
        def delete(some: Sequence[str]) -> None:
            for key in some:
                self.shelf.blobs.pop(key, None)

        self._call("delete_many", lambda: delete(keys), lambda: delete(keys[: len(keys) // 2]))

    def touch_many(self, keys: Sequence[str]) -> None:
        self._call("touch_many", lambda: None)

    def hold(self, name: str) -> bool:
        return self._call("hold", lambda: True)

    def close(self) -> None:
        self._call("close", lambda: None)


@hookimpl
def kvloom_storage_backends() -> list[type[StorageBackend]]:
    return [FaultyBackend]
