"""A put blob comes back unchanged, and any history of calls has the outcomes of a dictionary."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest

from kvloom import StorageBackend
from kvloom_testkit.backends.base import ANSWER_SECONDS, BackendRequirements, Open, Raw, again, content, contents
from kvloom_testkit.backends.doubles import FAILURES, BreaksHalfWay, RecordingSink, put_all
from kvloom_testkit.keys import Namespace, blob_of
from kvloom_testkit.requirements import claims
from kvloom_testkit.running import together

SIZES = (1, 4095, 4096, 4097, 1 << 20, (4 << 20) + 1)
"""Bytes of blobs: around a page, and more than one call of an operating system, or one message, may move."""
BUFFERS = 1025
"""One more than an operating system takes in one call (IOV_MAX)."""


class ValueRequirements(BackendRequirements):
    """Single blobs."""

    def test_B01_gives_back_what_was_put(self, names: Namespace, opened: Open) -> None:
        """`get` returns the bytes that were put, however many, in one buffer or in a thousand.

        The result is `bytes` or another buffer.

        Why: everything else depends on it.

        Usually: only the first buffer is written, a short write or read is taken for all of it, or more is given to one
        call or message than fits.
        """
        backend = opened()
        for number, size in enumerate(SIZES):
            blob = blob_of(size)
            for parts in ([blob], [blob[: size // 3], blob[size // 3 : size // 2], memoryview(blob)[size // 2 :]]):
                backend.put(names.key(number), parts)
                assert content(backend.get(names.key(number))) == blob, f"of {size} bytes in {len(parts)} buffers"
        many = [blob[start : start + 99] for start in range(0, 99 * BUFFERS, 99)]
        backend.put(names.key(), many)
        assert content(backend.get(names.key())) == b"".join(many), f"in {BUFFERS} buffers"

    def test_B02_what_is_not_there_is_none(self, names: Namespace, opened: Open) -> None:
        """`get` of a key that was never put, or was deleted, is None.

        Why: misses are frequent, and an exception would count as a failure of the tier.

        Usually: the client's "not found" exception is not caught, or something empty is returned.
        """
        backend = opened()
        assert backend.get(names.key()) is None
        backend.put(names.key(), [b"blob"])
        backend.delete(names.key())
        assert backend.get(names.key()) is None

    def test_B03_the_last_put_wins(self, names: Namespace, opened: Open) -> None:
        """After a second `put` of a key only the second blob is stored, whether it is longer, shorter or as long as the
        first.

        Why: a chunk is stored again if a better version exists, and its length determines its end.

        Usually: the file is overwritten without being truncated, the store keeps the first of two values, or a blob of
        equal length is taken for the same.
        """
        backend, key = opened(), names.key()
        for size in (5000, 5000, 100_000, 100, 5000):
            blob = blob_of(size)
            backend.put(key, [blob])
            assert content(backend.get(key)) == blob, f"put {size} bytes over what was there"
        assert content(again(backend, opened).get(key)) == blob

    def test_B04_delete_forgets_one_key_and_may_be_repeated(self, names: Namespace, opened: Open) -> None:
        """`delete` removes that key's blob and no other; without a blob it does nothing.

        This also holds if the key is the beginning of others.

        Why: several processes may delete the same blob, which is not a failure.

        Usually: the client's "not found" exception is not caught, or the key is taken for a prefix.
        """
        backend, (one, other) = opened(), names.keys(2)
        backend.delete(one)
        backend.put(one, [b"one"])
        backend.put(other, [b"other"])
        backend.delete(one)
        backend.delete(one)
        below = names.named("a/b/c")
        backend.put(below, [b"below"])
        for above in (names.named("a/b"), names.named("a")):
            backend.delete(above)
        backend = again(backend, opened)
        assert backend.get(one) is None and content(backend.get(other)) == b"other"
        assert content(backend.get(below)) == b"below", "after what its key begins with was deleted"

    def test_B05_contains_agrees_with_get(self, names: Namespace, opened: Open) -> None:
        """`contains` is true exactly if `get` would return a blob; a longer key does not make a shorter one exist.

        Why: a lookup relies on `contains`, and the engine computes chunks that it denies.

        Usually: it asks a table in memory which a new instance starts without, a deleted key stays in a filter, or a
        directory is taken for a blob.
        """
        backend, key = opened(), names.key()
        assert not backend.contains(key)
        backend.put(key, [b"blob"])
        assert backend.contains(key)
        backend.put(names.key(1), [b"blob"])
        second = again(backend, opened)
        assert second.contains(key) and second.contains(names.key(1))
        second.delete(key)
        assert not second.contains(key) and second.contains(names.key(1))
        second.put(names.named("a/b/c"), [b"blob"])
        for above in (f"{names.fingerprint}/a/b", f"{names.fingerprint}/a"):
            assert not second.contains(above) and second.get(above) is None, "the beginning of a key"

    def test_B06_buffers_belong_to_the_caller_again_after_put(self, names: Namespace, opened: Open) -> None:
        """Changes of the caller's buffers after `put` has returned do not change the blob.

        Why: the buffers are a pool's memory, which holds another chunk a moment later.

        Usually: the buffer itself is kept, or another thread is still writing it.
        """
        backend = opened()
        for number, size in enumerate((100, 1 << 20)):
            blob = blob_of(size)
            memory = bytearray(blob)
            backend.put(names.key(number), [memoryview(memory)])
            memory[:] = bytes(size)
            assert content(backend.get(names.key(number))) == blob, f"of {size} bytes"

    def test_B07_what_get_returned_stays_as_it_is(self, names: Namespace, opened: Open) -> None:
        """A buffer that `get` returned keeps its bytes through later calls, and when the store is closed.

        Why: it is verified first and copied later; a change in between would be served as valid.

        Usually: a view of the store's own memory, of a buffer that the next `get` reuses, or of a mapped file, which
        `close` unmaps.
        """
        backend, (one, other) = opened(), names.keys(2)
        first, second = blob_of(10_000), blob_of(10_000)
        backend.put(one, [first])
        backend.put(other, [second])
        got = backend.get(one)
        for change in (
            lambda: backend.get(other), lambda: backend.put(one, [second]), lambda: backend.delete(one),
            lambda: backend.put(other, [bytes(10_000)]),
        ):  # fmt: skip
            change()
            assert content(got) == first
        opened.close(backend)
        assert content(got) == first, "after `close`"

    def test_B12_a_put_that_fails_leaves_no_part(self, names: Namespace, opened: Open) -> None:
        """If a buffer cannot be read half-way, `put` raises; the old blob is still stored, or none, and never a part.

        The same holds for each blob of `put_many`, `put_over` and `create`. Other threads continue to use the store.

        Why: a reader trusts a blob's length because puts are all or nothing, and a put may be interrupted anywhere.

        Usually: buffers are written one by one to the blob's final place; `create` opens that place, or `put_over` a
        victim's, and writes there; a lock is not released on an exception; or an OSError is ignored because "only a
        cache" has failed: the core then counts, and later asks for, a blob that was never stored.
        """
        backend, (new, old) = opened(), names.keys(2)
        blob = blob_of(50_000)
        backend.put(old, [blob])
        for key, failure in product((new, old), FAILURES):
            with pytest.raises(Exception):  # noqa: B017
                backend.put(key, BreaksHalfWay(blob_of(20_000), failure))
        together(lambda: (backend.put(names.key(2), [blob]), backend.get(old)), seconds=ANSWER_SECONDS)
        backend = again(backend, opened)
        assert backend.get(new) is None and not backend.contains(new)
        assert content(backend.get(old)) in (blob, None)
        backend.put(new, [blob])
        assert content(backend.get(new)) == blob, "put again after the failure"
        new, old, victim = names.keys(6)[3:]
        put_all(backend, [(old, [blob]), (victim, [blob])])
        ways: list[Callable[[BreaksHalfWay], object]] = [
            lambda broken: put_all(backend, [(old, [blob]), (new, broken)]),
            lambda broken: backend.put_over(new, broken, [victim]),
        ]
        if claims(backend, "create", StorageBackend):
            ways.append(lambda broken: backend.create(new, broken))
        for way, failure in product(ways, FAILURES):
            with pytest.raises(Exception):  # noqa: B017
                way(BreaksHalfWay(blob_of(20_000), failure))
            assert backend.get(new) is None and not backend.contains(new)
            assert content(backend.get(old)) in (blob, None) and content(backend.get(victim)) in (blob, None)
            together(lambda: (backend.put(names.key(2), [blob]), backend.get(old)), seconds=ANSWER_SECONDS)

    def test_B44_a_chunk_of_a_large_model_fits(self, names: Namespace, opened: Open) -> None:
        """A blob of 33 MiB comes back whole, by `get`, `get_into` and `get_range`.

        If the store is `bounded`, `put` may refuse it, or `get` may return None; never a part.

        Why: 256 tokens of a model of 8 billion parameters take 32 MiB.

        Usually: the store limits a value or a message, often to 16 MiB.
        """
        backend, key = opened(), names.key()
        page = blob_of((1 << 20) + 3)
        half = page * 16 + page[: 1 << 19]
        size, bounded = 2 * len(half), type(backend).bounded
        try:
            backend.put(key, [half, half])
        except Exception:
            assert bounded
            return
        got = backend.get(key)
        view = memoryview(b"" if got is None else got).cast("B")  # not copied: that takes memory
        length, whole = len(view), view[: len(half)] == view[len(half) :] == half
        assert whole or (bounded and got is None), f"of {size} bytes came {length}"
        del got, view
        sink, end = RecordingSink(), memoryview(bytearray(1000))
        there = backend.get_into(key, sink)
        whole = sink.reserved == [size] and sink.memory[: len(half)] == sink.memory[len(half) :] == half
        assert whole or (bounded and not there), f"into the memory of {size} bytes came something else"
        there = backend.get_range(key, size - len(end), end)
        whole = end == half[-len(end) :]
        assert whole or (bounded and not there), "the end of it is something else"

    def test_B34_put_and_get_do_not_hide_faults_of_each_other(
        self, names: Namespace, opened: Open, raw: Raw | None
    ) -> None:
        """A blob that was put is in the store itself: visible to a second instance, and beside the backend.

        Why: a `get` that is answered from memory proves nothing about the store.

        Usually: a cache in the instance in front of a write that went wrong.
        """
        backend, keys = opened(), names.keys(3)
        blobs = [blob_of(size) for size in (100, 5000, 70_000)]
        for key, blob in zip(keys, blobs, strict=True):
            backend.put(key, [blob[:10], blob[10:]])
            assert content(backend.get(key)) == blob
        second = again(backend, opened)
        if second is backend and raw is None:
            pytest.skip("no second instance sees the store, and there is no fixture `raw` to read round the backend")
        for key, blob in zip(keys, blobs, strict=True):
            assert content(second.get(key)) == blob, "what another instance reads"
            if raw is not None:
                assert raw.get(key) == blob, "what is read round the backend"
                raw.set(key, blob[::-1])
                assert content(again(second, opened).get(key)) == blob[::-1], "what was written round the backend"


SEEDS = (1, 2)
STEPS = 300
KEYS = 5


class HistoryRequirements(BackendRequirements):
    """Sequences."""

    def test_B32_any_history_equals_that_of_a_dictionary(self, names: Namespace, opened: Open) -> None:
        """After any sequence of puts, deletes and re-openings the store equals a dictionary.

        Why: each call depends on the state that earlier calls left.

        Usually: something that happens now and then: a compaction, a full page, a table that grows.
        """
        for seed in SEEDS:
            random_ = random.Random(seed)
            keys = [names.named(f"-/{seed}-{number}") for number in range(KEYS)]
            model: dict[str, bytes] = {}
            backend, history = opened(), []
            for step in range(STEPS):
                key, verb = random_.choice(keys), random_.random()
                if verb < 0.4:
                    blob = random_.randbytes(random_.choice((1, 10, 1000, 9000)))
                    cut = random_.randrange(len(blob) + 1)
                    backend.put(key, [blob[:cut], blob[cut:]])
                    model[key] = blob
                elif verb < 0.55:
                    backend.delete(key)
                    model.pop(key, None)
                elif verb < 0.57:
                    backend = again(backend, opened)
                history.append((round(verb, 2), keys.index(key)))
                assert content(backend.get(key)) == model.get(key), f"seed {seed}, step {step}: {history[-10:]}"
                assert bool(backend.contains(key)) == (key in model), f"seed {seed}, step {step}: {history[-10:]}"
            assert contents(backend.get_many(keys)) == [model.get(key) for key in keys], f"seed {seed}, at the end"
            opened.close(backend)
