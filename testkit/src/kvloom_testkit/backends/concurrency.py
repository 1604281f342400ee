"""Many threads on one store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

from kvloom import StorageBackend
from kvloom_testkit import effort
from kvloom_testkit.backends.base import (
    ANSWER_SECONDS,
    BackendRequirements,
    Open,
    content,
    contents,
    torn,
    versions_of,
)
from kvloom_testkit.backends.doubles import RecordingSink, put_all
from kvloom_testkit.keys import Namespace, blob_of
from kvloom_testkit.requirements import claims, needs
from kvloom_testkit.running import in_rounds, together

VERSIONS = 60
DELETIONS = 200
CREATIONS = 20
READS = 60
"""Minimum number of reads."""
WRITERS = 4
ROUNDS = 20
TURNS = 120
STRIDES = (1, 7, 11, 13, 17, 19, 23)
"""Each thread goes through all the keys in an order of its own."""


class ConcurrencyRequirements(BackendRequirements):
    """Threads."""

    def test_B09_nobody_reads_half_of_a_put(self, names: Namespace, opened: Open) -> None:
        """While a key is put again and again, `get` and `get_into` return one version whole, or nothing.

        Why: a torn blob costs a read, a check and a miss each time; without checks it is wrong KV.

        Usually: the blob's own file is opened for writing, which empties it, or parts are stored one by one.
        """
        backend, key, version = opened(), names.key(), versions_of(40_000)
        readers = [backend, opened() if type(backend).shared else backend]
        backend.put(key, [version(0)])
        work = _Work(2)
        together(
            *(partial(work.do, partial(_put_versions, backend, key, version, first)) for first in (1, 2)),
            *(partial(_read_whole, reader, key, version, work) for reader in readers),
            restless=True,
        )
        last = backend.get(key)
        assert last is not None and not torn(last, version)

    def test_B10_puts_at_the_same_time_are_all_kept(self, names: Namespace, opened: Open) -> None:
        """Blobs that several threads put under different keys are all stored, each under its own key.

        The same holds for several instances.

        Why: a tier has several writing threads.

        Usually: an index is read, changed and written back without a lock; scratch files or a buffer are shared; or
        each instance numbers its blobs on its own.
        """
        backend = opened()
        count_ = ROUNDS if type(backend).bounded else effort.rounds(ROUNDS)
        writers = [backend, opened() if type(backend).shared else backend] * (WRITERS // 2)
        keys = names.keys(WRITERS * count_)
        blobs = {key: blob_of(20_000 + number, seed=number) for number, key in enumerate(keys)}

        def put(writer: int, number: int) -> None:
            key = keys[WRITERS * number + writer]
            writers[writer].put(key, [blobs[key][:1000], blobs[key][1000:]])

        in_rounds(count_, *(partial(put, writer) for writer in range(WRITERS)))
        for reader in writers[:2]:
            assert [key for key in keys if content(reader.get(key)) != blobs[key]] == []

    def test_B11_get_beside_delete_is_whole_or_none(self, names: Namespace, opened: Open) -> None:
        """While a key is deleted and put again, reading it gives the whole blob or nothing, and never raises.

        Why: eviction races with every read; an exception would count against the tier.

        Usually: the file is checked for existence first, and then opened.
        """
        backend, key, version = opened(), names.key(), versions_of(20_000)

        def put_and_delete() -> None:
            for number in effort.turns(DELETIONS):
                backend.put(key, [version(number % 9)])
                backend.delete(key)
            backend.put(key, [version(9)])

        work = _Work(1)
        readers = [partial(_read_whole, backend, key, version, work)] * 3
        together(partial(work.do, put_and_delete), *readers, restless=True)
        assert content(backend.get(key)) == version(9)

    def test_B56_reads_at_the_same_time_give_each_its_own(self, names: Namespace, opened: Open) -> None:
        """Threads that read different keys at the same time, one by one, many at once or in part, each get their own
        blobs.

        Why: one instance serves all the reading threads of a tier.

        Usually: a scratch buffer, or a connection, that reads share.
        """
        backend, keys = opened(), names.keys(WRITERS)
        blobs = {key: blob_of(50_000, seed=number) for number, key in enumerate(keys)}
        put_all(backend, ((key, [blob]) for key, blob in blobs.items()))

        def read(reader: int, number: int) -> None:
            key, other = keys[reader], keys[(reader + 1) % len(keys)]
            part = memoryview(bytearray(20_000))
            assert content(backend.get(key)) == blobs[key], "by get"
            assert _got_into(backend, key) == blobs[key], "by get_into"
            assert _got_many_into(backend, [key, other]) == [blobs[key], blobs[other]], "by get_many_into"
            assert backend.get_range(key, 9000, part) and part == blobs[key][9000:29_000], "by get_range"

        in_rounds(effort.rounds(ROUNDS), *(partial(read, reader) for reader in range(len(keys))))

    @needs("create")
    def test_B20_create_lets_exactly_one_writer_in(self, names: Namespace, opened: Open) -> None:
        """One of several concurrent `create` calls for a key returns True, and its blob is stored; later ones return
        False.

        Why: it is claimed to be exclusive; leaders are elected and records are written with it.

        Usually: `contains` followed by `put`, which is two steps.
        """
        backend = opened()
        writers = [backend, opened() if type(backend).shared else backend] * 3
        for number in range(effort.rounds(CREATIONS)):
            key, told = names.key(number), [False] * len(writers)

            def create(index: int, key: str = key, told: list[bool] = told) -> None:
                told[index] = writers[index].create(key, [bytes([index]) * 3000])

            together(*(partial(create, index) for index in range(len(writers))), restless=True)
            assert told.count(True) == 1
            assert content(backend.get(key)) == bytes([told.index(True)]) * 3000
            assert backend.create(key, [b"late"]) is False and content(backend.get(key)) != b"late"
        backend.delete(key)
        assert backend.create(key, [b"anew"]) is True and content(backend.get(key)) == b"anew"

    def test_B33_every_verb_may_be_called_at_any_time(self, names: Namespace, opened: Open) -> None:
        """Concurrent puts, gets, lookups, listings and deletes raise nothing.

        Why: one instance serves the reads, the writes and the maintenance of a tier, each on separate threads.

        Usually: a client or connection that belongs to the thread that made it, or a table that changes while it is
        iterated.
        """
        backend, keys, blob = opened(), names.keys(30), blob_of(2000)
        memory = memoryview(bytearray(100))
        verbs: list[Callable[[str], object]] = [
            lambda key: backend.put(key, [blob]),
            lambda key: backend.get(key),
            lambda key: (backend.contains(key), backend.get_many([key, keys[0]]), backend.contains_many([key])),
            lambda key: list(backend.scan(names.prefix)),
            lambda key: (backend.get_range(key, 7, memory), backend.get_into(key, RecordingSink(blob))),
            lambda key: _got_many_into(backend, [key, keys[0], key]),
            lambda key: (backend.delete(key), backend.put_over(key, [blob], [keys[1]])),
        ]

        def use(verb: Callable[[str], object], stride: int) -> None:
            for turn in effort.turns(TURNS):
                verb(keys[turn * stride % len(keys)])

        together(*(partial(use, verb, stride) for verb, stride in zip(verbs, STRIDES, strict=True)), restless=True)

    def test_B43_what_one_thread_did_another_sees(self, names: Namespace, opened: Open) -> None:
        """A thread's put or delete is visible to every other thread's next call, whichever of them asked before.

        Why: blobs are written by a tier's own threads and read by its callers'.

        Usually: a connection or a cache for each thread, which continues to show the state of its first call.
        """
        backend, key = opened(), names.key()
        lists, room = claims(backend, "scan", StorageBackend), memoryview(bytearray(1))

        def sees(blob: bytes | None) -> None:
            assert content(backend.get(key)) == blob and contents(backend.get_many([key])) == [blob]
            assert backend.contains(key) == backend.get_range(key, 0, room) == (blob is not None)
            assert _got_into(backend, key) == blob and backend.contains_many([key]) == [blob is not None]
            assert _got_many_into(backend, [key]) == [blob]
            assert not lists or [entry.key for entry in backend.scan(names.prefix)] == [key] * (blob is not None)

        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another:
            for writer, reader in ((one, another), (another, one)):
                for blob in (b"one", b"another", None, b"a third"):
                    change = partial(backend.put, key, [blob]) if blob else partial(backend.delete, key)
                    writer.submit(change).result(ANSWER_SECONDS)
                    reader.submit(sees, blob).result(ANSWER_SECONDS)


def _put_versions(backend: StorageBackend, key: str, version: Callable[[int], bytes], first: int) -> None:
    for number in range(first, effort.rounds(VERSIONS), 2):
        blob = version(number)
        backend.put(key, [blob[:100], blob[100:]])


def _read_whole(backend: StorageBackend, key: str, version: Callable[[int], bytes], work: _Work) -> None:
    for turn in count():
        if turn >= READS and work.is_done():
            return
        ways = (backend.get, partial(_got_into, backend), lambda one: _got_many_into(backend, [one])[0])
        blob = ways[turn % len(ways)](key)
        assert blob is None or not torn(blob, version), f"{len(blob)} bytes of no version, or of several"


def _got_into(backend: StorageBackend, key: str) -> bytes | None:
    sink = RecordingSink()
    return bytes(sink.memory) if backend.get_into(key, sink) else None


def _got_many_into(backend: StorageBackend, keys: Sequence[str]) -> list[bytes | None]:
    """Raises what any of them failed with."""
    sinks = [RecordingSink() for _ in keys]
    outcomes: dict[int, bool | Exception] = {}
    backend.get_many_into(list(zip(keys, sinks, strict=True)), outcomes.__setitem__)
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            raise outcome
    return [bytes(sink.memory) if outcomes[number] else None for number, sink in enumerate(sinks)]


class _Work:
    """The work that readers run beside, until all of it is done or has failed."""

    def __init__(self, workers: int) -> None:
        self._left = [None] * workers

    def do(self, function: Callable[[], object]) -> None:
        try:
            function()
        finally:
            self._left.pop()

    def is_done(self) -> bool:
        return not self._left
