"""Backends that stand in front of another one and do to its calls what a bad day would."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from kvloom import Buffer, Buffers, Entry, Sink, StorageBackend, join
from kvloom_testkit.requirements import claims

T = TypeVar("T")

READS = frozenset({"get", "get_into", "get_range", "get_many"})
WRITES = frozenset({"put", "put_many", "put_over", "create"})
VERBS = READS | WRITES | {"contains", "contains_many", "delete", "delete_many", "scan", "touch_many", "hold"}

_CAPABILITIES = ("type", "persistent", "shared", "bounded", "one_by_one", "threads")
_OPTIONAL = ("scan", "create", "identity", "hold", "touch_many")


def every_key(key: str) -> bool:
    """The default of `keys`."""
    return True


class Proxy(StorageBackend):
    """Passes every call on to `inner`, with its capabilities. Subclasses put something in the way of `_call`.

    verbs: the calls that are meant, by what the caller of the proxy calls. keys: which keys are meant; a call about
    several is meant if one of them is.
    """

    type = "proxy"

    def __init__(
        self, inner: StorageBackend, *, verbs: Collection[str] = VERBS, keys: Callable[[str], bool] = every_key
    ) -> None:
        super().__init__(inner.config, inner.spec)
        if unknown := set(verbs) - VERBS:
            raise ValueError(f"verbs: no {', '.join(sorted(unknown))}; there are {', '.join(sorted(VERBS))}")
        self.inner = inner
        self.verbs = frozenset(verbs)
        self.keys = keys
        for name in _CAPABILITIES:
            setattr(self, name, getattr(inner, name))

    def _call(self, verb: str, keys: Iterable[str], call: Callable[[], T]) -> T:
        """Every call comes by here if it is meant."""
        return call()

    def _through(self, verb: str, keys: Sequence[str], call: Callable[[], T]) -> T:
        meant = verb in self.verbs and (not keys or any(map(self.keys, keys)))
        return self._call(verb, keys, call) if meant else call()

    def register(self, memory: memoryview) -> None:
        self.inner.register(memory)

    def put(self, key: str, blob: Buffers) -> None:
        self._through("put", [key], lambda: self.inner.put(key, blob))

    def get(self, key: str) -> Buffer | None:
        return self._through("get", [key], lambda: self.inner.get(key))

    def contains(self, key: str) -> bool:
        return self._through("contains", [key], lambda: self.inner.contains(key))

    def delete(self, key: str) -> None:
        self._through("delete", [key], lambda: self.inner.delete(key))

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        return self._through("scan", [], lambda: self.inner.scan(prefix))

    def get_into(self, key: str, sink: Sink) -> bool:
        return self._through("get_into", [key], lambda: self.inner.get_into(key, sink))

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        return self._through("get_range", [key], lambda: self.inner.get_range(key, offset, into))

    def put_many(self, items: Iterable[tuple[str, Buffers]]) -> None:
        items = list(items)
        self._through("put_many", [key for key, _ in items], lambda: self.inner.put_many(items))

    def get_many(self, keys: Sequence[str]) -> list[Buffer | None]:
        return self._through("get_many", keys, lambda: self.inner.get_many(keys))

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        return self._through("contains_many", keys, lambda: self.inner.contains_many(keys))

    def delete_many(self, keys: Sequence[str]) -> None:
        self._through("delete_many", keys, lambda: self.inner.delete_many(keys))

    def put_over(self, key: str, blob: Buffers, victims: Sequence[str]) -> None:
        self._through("put_over", [key], lambda: self.inner.put_over(key, blob, victims))

    def create(self, key: str, blob: Buffers) -> bool:
        return self._through("create", [key], lambda: self.inner.create(key, blob))

    def touch_many(self, keys: Sequence[str]) -> None:
        self._through("touch_many", keys, lambda: self.inner.touch_many(keys))

    def hold(self, name: str) -> bool:
        return self._through("hold", [], lambda: self.inner.hold(name))

    def identity(self) -> str | None:
        return self.inner.identity()

    def check_writable(self) -> None:
        self.inner.check_writable()

    def close(self) -> None:
        self.inner.close()


class FailsOn(Proxy):
    """Raises `error` on the `call`-th call that is meant (from 1), or from then on until `works` is set again.

    late: the call is made all the same, and only its answer is lost.
    """

    def __init__(
        self, inner: StorageBackend, call: int = 1, *, for_good: bool = False, late: bool = False,
        error: Callable[[], BaseException] = lambda: OSError("a fault that was asked for"), **which: Any,
    ) -> None:  # fmt: skip
        super().__init__(inner, **which)
        self.works = False
        self.calls = 0
        self._at, self._for_good, self._late, self._error = call, for_good, late, error
        self._lock = threading.Lock()

    def _call(self, verb: str, keys: Iterable[str], call: Callable[[], T]) -> T:
        with self._lock:
            self.calls += 1
            fails = not self.works and (self.calls == self._at or (self._for_good and self.calls > self._at))
        if not fails:
            return call()
        if self._late:
            call()
        raise self._error()


class Delays(Proxy):
    """Every call that is meant takes `seconds` longer."""

    def __init__(self, inner: StorageBackend, seconds: float, **which: Any) -> None:
        super().__init__(inner, **which)
        self.seconds = seconds

    def _call(self, verb: str, keys: Iterable[str], call: Callable[[], T]) -> T:
        time.sleep(self.seconds)
        return call()


class Hangs(Proxy):
    """Calls that are meant do not return, and then are made, before `release`; `close` releases them too."""

    def __init__(self, inner: StorageBackend, **which: Any) -> None:
        super().__init__(inner, **which)
        self.hung = threading.Event()
        """Set when a call hangs."""
        self._released = threading.Event()

    def _call(self, verb: str, keys: Iterable[str], call: Callable[[], T]) -> T:
        if not self._released.is_set():
            self.hung.set()
            self._released.wait()
        return call()

    def release(self) -> None:
        """Let every call continue, also later ones."""
        self._released.set()

    def close(self) -> None:
        self.release()
        super().close()


class Alters(Proxy):
    """Changes blobs with `altered`: on reads, writes, or both, as in `verbs`."""

    def __init__(self, inner: StorageBackend, *, verbs: Collection[str] = READS, **which: Any) -> None:
        super().__init__(inner, verbs=verbs, **which)

    @abstractmethod
    def altered(self, blob: bytes) -> bytes:
        """The altered blob."""

    def get(self, key: str) -> Buffer | None:
        return self._read("get", key)

    def get_many(self, keys: Sequence[str]) -> list[Buffer | None]:
        return [self._read("get_many", key) for key in keys]

    def get_into(self, key: str, sink: Sink) -> bool:
        blob = self._read("get_into", key)
        if blob is not None:
            sink.reserve(len(blob))[:] = blob
            sink.filled(len(blob))
        return blob is not None

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        blob = self._read("get_range", key)
        if blob is None or len(blob) < offset + len(into):
            return False
        into[:] = blob[offset : offset + len(into)]
        return True

    def put(self, key: str, blob: Buffers) -> None:
        self.inner.put(key, self._written("put", key, blob))

    def put_many(self, items: Iterable[tuple[str, Buffers]]) -> None:
        self.inner.put_many((key, self._written("put_many", key, blob)) for key, blob in items)

    def put_over(self, key: str, blob: Buffers, victims: Sequence[str]) -> None:
        self.inner.put_over(key, self._written("put_over", key, blob), victims)

    def create(self, key: str, blob: Buffers) -> bool:
        return self.inner.create(key, self._written("create", key, blob))

    def _read(self, verb: str, key: str) -> bytes | None:
        blob = self.inner.get(key)
        if blob is None:
            return None
        return self.altered(bytes(blob)) if verb in self.verbs and self.keys(key) else bytes(blob)

    def _written(self, verb: str, key: str, blob: Buffers) -> Buffers:
        return [self.altered(join(blob))] if verb in self.verbs and self.keys(key) else blob


class Truncates(Alters):
    """Keeps the first `keep` bytes of a blob; if negative, drops that many of the last."""

    def __init__(self, inner: StorageBackend, keep: int = -1, **which: Any) -> None:
        super().__init__(inner, **which)
        self.keep = keep

    def altered(self, blob: bytes) -> bytes:
        return blob[: self.keep]


class Flips(Alters):
    """Turns the lowest bit of the byte at `at` round; below 0, counted from the end. Shorter blobs stay as they are."""

    def __init__(self, inner: StorageBackend, at: int = -1, **which: Any) -> None:
        super().__init__(inner, **which)
        self.at = at

    def altered(self, blob: bytes) -> bytes:
        data = bytearray(blob)
        if -len(data) <= self.at < len(data):
            data[self.at] ^= 1
        return bytes(data)


def behind(cls: type[StorageBackend], wrap: Callable[[StorageBackend], StorageBackend]) -> type[StorageBackend]:
    """A class that is registered and opened like `cls` and whose instances are behind `wrap`, such as a `FailsOn`.

    It claims what `cls` claims and no more: the engine and the kit take it for `cls`.
    """

    def __init__(self: Proxy, config: Any, spec: Any = None) -> None:
        Proxy.__init__(self, wrap(cls(config, spec)))

    same = {name: getattr(cls, name) for name in (*_CAPABILITIES, "Config", "__module__")}
    unclaimed = {name: getattr(StorageBackend, name) for name in _OPTIONAL if not claims(cls, name, StorageBackend)}
    name = f"{cls.__name__}BehindFaults"
    qualified = {"__qualname__": f"behind.<locals>.{name}"}  # no other process can import it
    return type(name, (Proxy,), {**same, **unclaimed, **qualified, "__init__": __init__})
