"""Backends that stand in front of another one and do to its calls what a bad day would."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kvloom import Buffer, Buffers, Entry, ReadDone, Sink, StorageBackend, WriteDone, join
from kvloom_testkit.requirements import claims

T = TypeVar("T")
Done = Callable[[int, Any], None]
"""Told of each request of a batch, by its number."""
Batch = Callable[[Sequence[int], Done], None]
"""Passes these requests on, by one call."""

READS = frozenset({"get", "get_into", "get_range", "get_many", "get_many_into"})
WRITES = frozenset({"put", "put_many", "put_over", "create"})
VERBS = READS | WRITES | {"contains", "contains_many", "delete", "delete_many", "scan", "touch_many", "hold"}

_CAPABILITIES = ("type", "persistent", "shared", "bounded", "one_by_one", "threads")
_OPTIONAL = ("scan", "create", "identity", "hold", "touch_many", "get_many_into", "put_many")


def every_key(key: str) -> bool:
    """The default of `keys`."""
    return True


class Proxy(StorageBackend):
    """Passes every call on to `inner`, with its capabilities. Subclasses put something in the way of `_call`.

    verbs: the calls that are meant, by what the caller of the proxy calls. keys: which keys are meant; a call about
    several is meant if one of them is. Of a batch (`get_many_into`, `put_many`) the requests that are not meant go
    before the others, as a batch of their own.
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

    def _pass_batch(self, verb: str, keys: Sequence[str], call: Batch, done: Done) -> None:
        meant = [number for number, key in enumerate(keys) if verb in self.verbs and self.keys(key)]
        rest = [number for number in range(len(keys)) if number not in set(meant)]
        if rest or not keys:
            call(rest, done)
        if meant:
            self._batch(verb, {number: keys[number] for number in meant}, call, done)

    def _batch(self, verb: str, keys: Mapping[int, str], call: Batch, done: Done) -> None:
        """Every batch comes by here with the requests that are meant, by their numbers.

        call: passes the given ones of them on, by one call.
        """
        self._call(verb, keys.values(), lambda: call(list(keys), done))

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

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        def call(numbers: Sequence[int], done: Done) -> None:
            some = [requests[number] for number in numbers]
            self.inner.get_many_into(some, lambda place, outcome: done(numbers[place], outcome))

        self._pass_batch("get_many_into", [key for key, _ in requests], call, done)

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        def call(numbers: Sequence[int], done: Done) -> None:
            some = [requests[number] for number in numbers]
            self.inner.put_many(some, lambda place, outcome: done(numbers[place], outcome))

        self._pass_batch("put_many", [key for key, _ in requests], call, done)

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

    late: the call is made all the same, and only its answer is lost. Each request of a batch counts as a call; those
    that fail have `error` as their outcome, and the others pass.
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
        if not self._fails():
            return call()
        if self._late:
            call()
        raise self._error()

    def _batch(self, verb: str, keys: Mapping[int, str], call: Batch, done: Done) -> None:
        failing = {number for number in keys if self._fails()}
        passed = [number for number in keys if self._late or number not in failing]
        if passed:
            call(passed, lambda number, outcome: done(number, self._caught() if number in failing else outcome))
        for number in failing.difference(passed):
            done(number, self._caught())

    def _fails(self) -> bool:
        with self._lock:
            self.calls += 1
            return not self.works and (self.calls == self._at or (self._for_good and self.calls > self._at))

    def _caught(self) -> Exception:
        error = self._error()
        if isinstance(error, Exception):
            return error
        raise error


class Delays(Proxy):
    """Every call that is meant takes `seconds` longer; a batch is one call."""

    def __init__(self, inner: StorageBackend, seconds: float, **which: Any) -> None:
        super().__init__(inner, **which)
        self.seconds = seconds

    def _call(self, verb: str, keys: Iterable[str], call: Callable[[], T]) -> T:
        time.sleep(self.seconds)
        return call()


class Hangs(Proxy):
    """Calls that are meant do not return, and then are made, before `release`; `close` releases them too.

    A batch hangs half-way if some of its requests are not meant.
    """

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

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        copies = [(key, _Copy(sink)) for key, sink in requests]

        def filled(number: int, outcome: bool | Exception) -> None:
            key, copy = copies[number]
            if outcome is True:
                meant = "get_many_into" in self.verbs and self.keys(key)
                try:
                    copy.give(self.altered(bytes(copy.blob)) if meant else bytes(copy.blob))
                except Exception as error:
                    outcome = error
            done(number, outcome)

        self.inner.get_many_into(copies, filled)

    def put_many(self, requests: Sequence[tuple[str, Buffers]], done: WriteDone) -> None:
        altered: dict[int, tuple[str, Buffers]] = {}
        for number, (key, blob) in enumerate(requests):
            try:
                altered[number] = key, self._written("put_many", key, blob)
            except Exception as error:  # a buffer that cannot be read
                done(number, error)
        numbers = list(altered)
        self.inner.put_many(list(altered.values()), lambda place, outcome: done(numbers[place], outcome))

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


class _Copy:
    """A sink of our own before that of the caller."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.blob = bytearray()
        most = getattr(sink, "max_bytes", None)
        if most is not None:
            self.max_bytes = most

    def reserve(self, num_bytes: int) -> memoryview:
        self.blob = bytearray(num_bytes)
        return memoryview(self.blob)

    def filled(self, num_bytes: int) -> None:
        """The caller is told of what it gets."""

    def give(self, blob: bytes) -> None:
        self._sink.reserve(len(blob))[:] = blob
        self._sink.filled(len(blob))


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
