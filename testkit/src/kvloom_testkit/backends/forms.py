"""The forms that exist for speed do what the plain ones do."""

from __future__ import annotations

import threading

import pytest

from kvloom import BackendError
from kvloom_testkit.backends.base import ANSWER_SECONDS, BackendRequirements, Open, again, content, contents
from kvloom_testkit.backends.doubles import RecordingSink, put_all
from kvloom_testkit.keys import Namespace, blob_of
from kvloom_testkit.running import together


class FormRequirements(BackendRequirements):
    """`get_into`, `get_range`, the forms for many keys, and `put_over`."""

    def test_B13_get_into_fills_what_the_sink_gives(self, names: Namespace, opened: Open) -> None:
        """`get_into` reserves the size of the blob once, and reports arrived bytes, never too many, and all in the end.

        A key without a blob is False, with nothing reserved. Errors of `reserve` pass through, and other threads
        continue to read and write.

        Why: the blob is verified while it arrives, in memory of a pool with little room.

        Usually: `filled` is called before the read, or not at all; `reserve` is asked with a size that was stored
        elsewhere; or its exception is taken for a miss, or leaves a lock behind.
        """
        backend, key = opened(), names.key()
        absent = RecordingSink()
        assert backend.get_into(key, absent) is False and absent.reserved == [] and absent.told == []
        for size in (1, 5000, (1 << 20) + 17):
            blob = blob_of(size)
            backend.put(key, [blob])
            sink = RecordingSink(blob)
            assert backend.get_into(key, sink) is True
            assert sink.reserved == [size], "what was reserved"
            assert sink.early is None, f"{sink.early} bytes were said to have arrived, which had not"
            assert sink.memory == blob, "what arrived"
            assert sink.told == sorted(sink.told) and sink.told[-1:] == [size], "what was said to have arrived"
            refusal = BackendError("no room")
            with pytest.raises(BackendError) as raised:
                backend.get_into(key, RecordingSink(refusal=refusal))
            assert raised.value is refusal
            together(lambda: (backend.get(key), backend.put(names.key(1), [b"blob"])), seconds=ANSWER_SECONDS)
        assert content(backend.get(key)) == blob, "read again after a refusal"

    def test_B50_get_many_into_has_an_outcome_for_each_request(self, names: Namespace, opened: Open) -> None:
        """`get_many_into` reports each request once: with True for a blob that has arrived, with False where there is
        none, with its own exception if its sink refuses, and whatever happens to the others. A sink may refuse its
        memory, or what has arrived in it. All is reported on the calling thread.

        A key may come twice. In each sink only its own blob arrives, as B13 says of `get_into`.

        Why: the core reads all chunks of a request this way, and matches the outcomes by their numbers.

        Usually: outcomes are counted in the order of arrival, missing keys are left out, one refusal ends the batch or
        leaves its bytes to the next, what a sink says of damage goes unheard, or nothing is reported for the same key
        asked for a second time.
        """
        backend = opened()
        sizes = [1, 5000, (1 << 20) + 17, 300, 70_000, 4096, *range(200, 240)]
        keys, absent = names.keys(len(sizes)), names.named("absent")
        blobs = {key: blob_of(size) for key, size in zip(keys, sizes, strict=True)}
        put_all(backend, ((key, [blob]) for key, blob in blobs.items()))
        refusal = BackendError("no room")
        asked = [*keys[:3], absent, *keys[3:], absent, keys[2], keys[0]]
        refused, late = {1, 6, len(asked) - 2}, {2, 9}
        sinks = [
            RecordingSink(blobs.get(key), refusal=refusal if number in refused | late else None, late=number in late)
            for number, key in enumerate(asked)
        ]
        told: list[tuple[int, bool | Exception]] = []
        threads = set()

        def done(number: int, outcome: bool | Exception) -> None:
            threads.add(threading.get_ident())
            told.append((number, outcome))

        backend.get_many_into(list(zip(asked, sinks, strict=True)), done)
        assert threads == {threading.get_ident()}, "on the calling thread"
        assert sorted(number for number, _ in told) == list(range(len(asked))), "each is reported once"
        for number, outcome in told:
            key, sink = asked[number], sinks[number]
            if key == absent:
                assert outcome is False and sink.reserved == []
                continue
            assert sink.reserved == [len(blobs[key])], "what was reserved"
            if number in refused | late:
                assert outcome is refusal, "what the sink raised"
                continue
            assert outcome is True, f"{outcome} of a blob of {len(blobs[key])} bytes"
            assert sink.early is None, f"{sink.early} bytes were said to have arrived, which had not"
            assert sink.memory == blobs[key], "what arrived"
            assert sink.told[-1:] == [len(blobs[key])], "what was said to have arrived"
        backend.get_many_into([], lambda *outcome: told.append(outcome))
        assert len(told) == len(asked), "of nothing, nothing is said"

    def test_B51_map_gives_the_blob_or_nothing(self, names: Namespace, opened: Open) -> None:
        """`map` gives the whole blob as memory, or None; always None for one that is longer than `most_bytes`.

        `current` is True until the blob is replaced or deleted, and False from then on; `gone` is the opposite, but for
        a blob that was changed where it lies.

        What is written to `view` changes the blob for nobody. `view` may be read after the blob is gone. Closing one
        leaves the others as they are.

        Why: the core verifies a mapped blob once, and asks `current` before and after each use instead.

        Usually: `current` says what was known when the blob was mapped; a blob written anew under the key goes unseen;
        the memory is the store's own, so that a write to it is everybody's; or a file with holes is mapped whole, which
        takes memory for all of it.
        """
        backend, key, other = opened(), names.key(), names.key(1)
        blob, different = blob_of(10_007), blob_of(5000)
        assert backend.map(key, len(blob)) is None, "of no blob"
        put_all(backend, [(key, [blob]), (other, [different])])
        assert backend.map(key, len(blob) - 1) is None, "of a blob that is longer than wanted"
        first, second = backend.map(key, len(blob)), backend.map(other, 1 << 30)
        if first is None or second is None:
            assert first is None and second is None, "one is mapped, and the other is not"
            return
        assert bytes(first.view) == blob and bytes(second.view) == different, "what was mapped"
        assert first.current() and second.current(), "nothing has changed"
        assert not first.gone() and not second.gone(), "nothing has changed"
        first.view[0] ^= 1
        assert content(backend.get(key)) == blob, "what was written to the memory came into the store"
        first.view[0] ^= 1
        backend.touch_many([key, other])
        assert first.current(), "to be used is no change"
        backend.put(key, [blob])
        assert not first.current() and second.current(), "one was written anew"
        assert first.gone() and not second.gone(), "one was written anew"
        assert bytes(first.view) == blob, "after it was written anew"
        backend.delete(other)
        assert not second.current() and second.gone(), "after it was deleted"
        assert bytes(second.view) == different, "after it was deleted"
        second.close()
        assert bytes(first.view) == blob, "after another was closed"
        first.close()
        again = backend.map(key, len(blob))
        assert again is not None and again.current() and bytes(again.view) == blob, "mapped again"
        again.close()

    def test_B57_mapped_blobs_are_asked_about_many_at_once(self, names: Namespace, opened: Open) -> None:
        """`current_many` says of each blob what its `current` says, in their order; one may come twice.

        Why: the core asks about all chunks of a request at once, before and after they are read.

        Usually: one that has changed makes all of them be as it is; or the answers are those of the distinct blobs, and
        fewer.
        """
        backend, keys = opened(), [names.key(number) for number in range(4)]
        assert list(backend.current_many([])) == [], "of nothing"
        put_all(backend, [(key, [blob_of(4097)]) for key in keys])
        found = [backend.map(key, 1 << 20) for key in keys]
        blobs = [blob for blob in found if blob is not None]
        if not blobs:
            return
        assert len(blobs) == len(keys), "one is mapped, and the other is not"
        backend.put(keys[1], [blob_of(4097)])
        backend.delete(keys[2])
        asked = [*blobs, blobs[0], blobs[1]]
        assert list(backend.current_many(asked)) == [True, False, False, True, True, False]
        for blob in blobs:
            blob.close()

    def test_B58_many_blobs_are_mapped_at_once(self, names: Namespace, opened: Open) -> None:
        """`map_many` gives for each key and its `most_bytes` what `map` gives, in their order; a key may come twice.

        Why: the core maps all chunks of a request at once, and takes the answers by their places.

        Usually: blobs that are not there are left out; one `most_bytes` is taken for all; or a key that comes twice is
        one blob, which is closed with the first of them.
        """
        backend, keys = opened(), [names.key(number) for number in range(3)]
        blobs = [blob_of(4097), blob_of(4098), blob_of(4099)]
        assert list(backend.map_many([])) == [], "of nothing"
        put_all(backend, [(key, [blob]) for key, blob in zip(keys, blobs, strict=True)])
        asked = [(keys[0], 4097), (names.key(3), 1 << 20), (keys[1], 4097), (keys[2], 4099), (keys[0], 1 << 20)]
        found = list(backend.map_many(asked))
        alone = backend.map(keys[0], 4097)
        if alone is None:
            assert found == [None] * len(asked), "none is mapped alone"
            return
        alone.close()
        expected = [blobs[0], None, None, blobs[2], blobs[0]]
        assert [None if one is None else bytes(one.view) for one in found] == expected
        first, last = found[0], found[4]
        assert first is not None and last is not None
        first.close()
        assert bytes(last.view) == blobs[0] and last.current(), "after the same blob was closed"
        for one in found[3:]:
            assert one is not None
            one.close()

    def test_B14_get_range_fills_exactly_what_is_asked_for(self, names: Namespace, opened: Open) -> None:
        """`get_range` fills `into` with the bytes from `offset`; False if the blob ends before, or there is none.

        An empty `into` is True for offsets up to and including the blob's end, and False beyond it.

        Why: headers and single layers are read this way, at odd offsets.

        Usually: a short read is taken for all of it, the offset is rounded to a page, the end is off by one, or an
        empty range is an error of the store.
        """
        backend, key = opened(), names.key()
        size = 100_003
        blob = blob_of(size)
        assert backend.get_range(key, 0, memoryview(bytearray(10))) is False
        assert backend.get_range(key, 0, memoryview(bytearray())) is False, "an empty range of no blob"
        backend.put(key, [blob[:7], blob[7:]])
        ranges = [(0, 1), (0, size), (1, 4096), (4095, 2), (4096, 4096), (33_333, 50_001), (size - 1, 1), (7, size - 7)]
        ranges += [(0, 0), (5000, 0), (size, 0)]
        for offset, length in ranges:
            into = bytearray(length)
            assert backend.get_range(key, offset, memoryview(into)) is True
            assert into == blob[offset : offset + length], f"{length} bytes from {offset}"
        for offset, length in [(0, size + 1), (size - 1, 2), (size, 1), (size + 5000, 10), (4096, size), (size + 1, 0)]:
            told = backend.get_range(key, offset, memoryview(bytearray(length)))
            assert told is False, f"{length} bytes from {offset} of {size}"

    def test_B15_many_at_once_is_one_by_one(self, names: Namespace, opened: Open) -> None:
        """`put_many`, `get_many`, `contains_many` and `delete_many` do what the single forms do, key by key, in order.

        The results are lists as long as the keys; a key may be missing, or come twice.

        Why: the core asks for whole chains of keys, and matches the results by position.

        Usually: the store's answer has another order and omits missing keys; only one batch is requested; or the result
        is a generator, which runs after the call's deadline.
        """
        backend = opened()
        present, absent = names.keys(40), [names.named(f"absent-{number}") for number in range(5)]
        blobs = {key: blob_of(100 + number) for number, key in enumerate(present)}
        twice = [(present[0], [b"first"]), *((key, [blob[:50], blob[50:]]) for key, blob in blobs.items())]
        put_all(backend, twice)
        backend = again(backend, opened)
        asked = [absent[0], *present[::-1], absent[1], present[3], absent[0], present[3]]
        got, there = backend.get_many(asked), backend.contains_many(asked)
        assert len(got) == len(there) == len(asked)
        assert contents(got) == [blobs.get(key) for key in asked]
        assert [bool(one) for one in there] == [key in blobs for key in asked]
        assert [content(backend.get(key)) for key in asked] == [blobs.get(key) for key in asked]
        backend.delete_many([absent[2], present[1], present[0], present[1]])
        left = backend.contains_many(present)
        assert [bool(there) for there in left] == [number not in (0, 1) for number in range(len(present))]
        put_all(backend, [])
        backend.delete_many([])
        assert list(backend.get_many([])) == [] and list(backend.contains_many([])) == []

    def test_B19_put_over_leaves_the_blob_and_no_victim(self, names: Namespace, opened: Open) -> None:
        """After `put_over` the blob is stored, its victims are gone, and everything else is unchanged.

        A victim may be missing, and the list may be empty. As with `put`, the key's old blob is replaced.

        Why: at its capacity a tier makes room with every put.

        Usually: the blob takes the place of a longer victim and keeps its tail, or only the first victim goes.
        """
        backend, keys = opened(), names.keys(8)
        kept, new, *victims = keys
        for size in (300_000, 20_000, 400_000):
            backend.put(kept, [b"kept"])
            put_all(backend, ((key, [blob_of(250_000)]) for key in victims[1:]))
            blob = blob_of(size)
            backend.put_over(new, [blob[: size // 2], blob[size // 2 :]], victims)
            backend = again(backend, opened)
            assert content(backend.get(new)) == blob, f"{size} bytes over victims of 250000"
            assert [key for key in victims if backend.contains(key) or backend.get(key) is not None] == []
            assert content(backend.get(kept)) == b"kept"
        backend.put_over(new, [b"new"], [])
        assert content(backend.get(new)) == b"new" and content(backend.get(kept)) == b"kept"
