"""Requirements of batches, read and written: the promises of single calls hold for each of their blobs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvloom import BackendError, Buffers
from kvloom_testkit.backends.base import ANSWER_SECONDS, BackendRequirements, Open, again, content
from kvloom_testkit.backends.doubles import BreaksHalfWay, RecordingSink, put_all
from kvloom_testkit.keys import Namespace, blob_of
from kvloom_testkit.running import together

_MEANWHILE_SECONDS = 1.0
"""How long somebody else's call is waited for amid a batch, which may have to end first."""


class _Fed(RecordingSink):
    """A sink that calls a function when it is asked for memory, or is told that bytes have arrived."""

    def __init__(self, *, reserving: Callable[[], object] = bool, filling: Callable[[], object] = bool) -> None:
        super().__init__()
        self._reserving, self._filling = reserving, filling

    def reserve(self, num_bytes: int) -> memoryview:
        self._reserving()
        return super().reserve(num_bytes)

    def filled(self, num_bytes: int) -> None:
        super().filled(num_bytes)
        self._filling()


class _Enough(BackendError):
    """The caller breaks off."""


class BatchRequirements(BackendRequirements):
    """`put_many` and `get_many_into` beside failures, callers that break off, and `close`."""

    def test_B52_put_many_has_an_outcome_for_each_request(self, names: Namespace, opened: Open) -> None:
        """`put_many` reports each request once, on the calling thread: with None once the blob is stored, or with the
        exception that `put` would raise, whatever happens to the others.

        From then on the buffers of that request may be reused. If a key comes twice, the later blob is there.

        Why: the core writes the chunks of a request this way, releases the memory of each as soon as it is stored, and
        counts each for itself.

        Usually: success is reported when a request is queued; the first failure ends the batch; or a batch is reported
        as a whole.
        """
        backend = opened()
        sizes = [5000, 1, (1 << 20) + 17, 300, 70_000, 4096, *range(200, 240)]
        keys, broken = names.keys(len(sizes)), {3, 17}
        blobs = [blob_of(size) for size in sizes]
        memory = [bytearray(blob) for blob in blobs]
        requests: list[tuple[str, Buffers]] = [
            (key, BreaksHalfWay(blob_of(20_000)) if number in broken else [memoryview(data)[:1], memoryview(data)[1:]])
            for number, (key, data) in enumerate(zip(keys, memory, strict=True))
        ]
        last = b"the later of two"
        requests += [(keys[5], [last])]
        told: list[tuple[int, Exception | None, int]] = []

        def done(number: int, outcome: Exception | None) -> None:
            told.append((number, outcome, threading.get_ident()))
            if number < len(memory):
                memory[number][:] = bytes(len(memory[number]))

        backend.put_many(requests, done)
        assert sorted(number for number, _, _ in told) == list(range(len(requests))), "each is reported once"
        assert {thread for _, _, thread in told} == {threading.get_ident()}, "not on the calling thread"
        failed = {number for number, outcome, _ in told if outcome is not None}
        assert failed == broken, f"these have failed: {failed}"
        assert all(outcome is None or isinstance(outcome, Exception) for _, outcome, _ in told)
        backend = again(backend, opened)
        for number, (key, blob) in enumerate(zip(keys, blobs, strict=True)):
            want = None if number in broken else last if number == 5 else blob
            assert content(backend.get(key)) == want, f"blob {number}, of {len(blob)} bytes"
        backend.put_many([], lambda *outcome: told.append((*outcome, 0)))
        assert len(told) == len(requests), "of nothing, nothing is said"

    def test_B53_a_caller_that_breaks_off_ends_nothing_else(self, names: Namespace, opened: Open) -> None:
        """A sink that raises in `filled` ends its own request, with that exception. After a `done` that raises, the
        batch may go on or raise; no request is reported twice, other threads can use the store, and each blob is whole.

        Why: a chunk that turns out to be corrupt while it arrives must cost no other, and a call that broke off must
        not cost the tier.

        Usually: the exception leaves a lock or a connection behind, or the rest of one reply is taken for the next.
        """
        backend = opened()
        keys = names.keys(12)
        blobs = {key: blob_of(3000 + 7000 * number) for number, key in enumerate(keys)}
        put_all(backend, ((key, [blob]) for key, blob in blobs.items()))
        refusal = _Enough()

        def refuse() -> None:
            raise refusal

        sinks = [
            _Fed(filling=refuse) if number in (1, 7) else RecordingSink(blobs[key]) for number, key in enumerate(keys)
        ]
        outcomes: dict[int, bool | Exception] = {}
        backend.get_many_into(list(zip(keys, sinks, strict=True)), outcomes.__setitem__)
        assert sorted(outcomes) == list(range(len(keys))), "each is reported"
        for number, (key, sink) in enumerate(zip(keys, sinks, strict=True)):
            if number in (1, 7):
                assert outcomes[number] is refusal, f"{outcomes[number]} where the sink has raised"
            else:
                assert outcomes[number] is True and sink.memory == blobs[key], "another request's blob"
        other = blob_of(9999)
        ways: list[Callable[[Callable[..., None]], None]] = [
            lambda done: backend.get_many_into([(key, RecordingSink()) for key in keys], done),
            lambda done: backend.put_many([(key, [other]) for key in keys], done),
        ]
        for way in ways:
            told: list[int] = []

            def break_off(number: int, outcome: Any, told: list[int] = told) -> None:
                told.append(number)
                if len(told) == 3:
                    raise _Enough

            with contextlib.suppress(Exception):
                way(break_off)
            assert len(set(told)) == len(told) >= 3, f"reported: {told}"
            together(lambda: (backend.get(keys[0]), backend.put(names.named("new"), [b"blob"])), seconds=ANSWER_SECONDS)
            for key, blob in blobs.items():
                assert content(backend.get(key)) in (blob, other), "what is there after the caller has broken off"
                together(lambda key=key: backend.put(key, [other]), seconds=ANSWER_SECONDS)
                blobs[key] = other

    def test_B54_a_blob_that_is_replaced_amid_a_batch_is_whole(self, names: Namespace, opened: Open) -> None:
        """A blob that is replaced by a shorter or longer one, or deleted, while a batch reads it, arrives whole as one
        of the two, or is reported as an exception or as missing. The others arrive.

        Why: a chunk may be written anew, or evicted, by any process at any time.

        Usually: the size is asked for first, and then as many bytes are read of whatever is there.
        """
        backend = opened()
        keys = names.keys(6)
        old, others = blob_of(30_000), {2: blob_of(90_000), 3: blob_of(5000), 4: None}
        put_all(backend, ((key, [old]) for key in keys))
        threads: list[threading.Thread] = []

        def change(number: int) -> None:
            blob = others[number]
            change = (
                (lambda: backend.delete(keys[number])) if blob is None else (lambda: backend.put(keys[number], [blob]))
            )
            threads.append(threading.Thread(target=change, daemon=True))
            threads[-1].start()
            threads[-1].join(_MEANWHILE_SECONDS)

        sinks = [
            _Fed(reserving=lambda number=number: change(number)) if number in others else RecordingSink(old)
            for number in range(len(keys))
        ]
        told: dict[int, bool | Exception] = {}
        backend.get_many_into(list(zip(keys, sinks, strict=True)), told.__setitem__)
        assert sorted(told) == list(range(len(keys))), "each is reported"
        for thread in threads:
            thread.join(ANSWER_SECONDS)
            assert not thread.is_alive(), "who changed a blob meanwhile was still busy"
        for number, sink in enumerate(sinks):
            if number not in others:
                assert told[number] is True and sink.memory == old, "what nobody has changed"
            elif told[number] is True:
                assert sink.memory in (old, others[number]), f"of {len(old)} bytes: {len(sink.memory)}, of no one blob"
                assert sink.told[-1:] == [len(sink.memory)], "what was said to have arrived"

    def test_B55_close_amid_a_batch_leaves_whole_blobs(self, names: Namespace, opened: Open) -> None:
        """If `close` is called while a batch is under way, the batch ends soon, with outcomes or an exception. What it
        reports as stored or read is; of the rest there is a whole blob or none.

        Why: an engine that closes does not wait for calls past their deadline, and the process may live on.

        Usually: a connection or a handle is closed under the call, which then uses another's, crashes or never ends.
        """
        for direction in ("put_many", "get_many_into"):
            self._close_amid(direction, names.keys(40), opened)

    def _close_amid(self, direction: str, keys: Sequence[str], opened: Open) -> None:
        old, new = blob_of(20_000), blob_of(30_000)
        backend = opened()
        put_all(backend, ((key, [old]) for key in keys))
        sinks = [RecordingSink() for _ in keys]
        told: list[tuple[int, Any]] = []
        returned: list[bool] = []
        closing = threading.Thread(target=backend.close, daemon=True)

        def done(number: int, outcome: Any) -> None:
            told.append((number, outcome))
            if len(told) == 3:
                closing.start()
                closing.join(_MEANWHILE_SECONDS)

        def batch() -> None:
            with contextlib.suppress(Exception):
                if direction == "put_many":
                    backend.put_many([(key, [new]) for key in keys], done)
                else:
                    backend.get_many_into(list(zip(keys, sinks, strict=True)), done)
                returned.append(True)

        together(batch, seconds=ANSWER_SECONDS)
        assert len(told) >= 3, "it had an outcome for none"
        closing.join(ANSWER_SECONDS)
        assert not closing.is_alive(), "`close` was still busy after the batch"
        numbers = [number for number, _ in told]
        assert len(set(numbers)) == len(numbers), "one was reported twice"
        assert not returned or sorted(numbers) == list(range(len(keys))), "it returned, and reported some never"
        fresh = opened()
        for number, outcome in told:
            if direction == "get_many_into":
                assert outcome is not True or sinks[number].memory == old, "what was read"
            elif outcome is None and type(backend).persistent and not type(backend).bounded:
                assert content(fresh.get(keys[number])) == new, "it was reported as stored"
        for key in keys:
            assert content(fresh.get(key)) in (old, new, None), "a part of a blob"
        opened.close(fresh)
