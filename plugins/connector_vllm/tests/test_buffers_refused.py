"""The KV buffers: tensors by name, and what is refused."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from buffers_support import MIB, NOTHING, CreatingDict, ids, lookup, mark, put_in, store
from hypothesis import given, settings
from hypothesis import strategies as st

import kvloom
from kvloom import BackendError, Buffer, Buffers, ConfigError, DeadlineExceeded
from kvloom.builtin.dict_backend import DictBackend
from kvloom_connector_vllm.buffers import blobs

FORK = multiprocessing.get_context("fork")

# -- tensors by name ---------------------------------------------------------------------------------------------------

VALUES = st.one_of(st.none(), st.lists(st.integers(-3, 3), max_size=4))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "a/b", "", "\ud800", "é" * 300]), st.booleans(), VALUES), max_size=12))
def test_it_does_what_a_dict_would_do(steps: list[tuple[str, bool, list[int] | None]]) -> None:
    buffer, model = store(), {}
    for key, write, value in steps:
        if write:
            buffer.put(key, None if value is None else torch.tensor(value, dtype=torch.int8))
            model.pop(key, None)
            if value is not None:
                model[key] = value
        got = buffer.get(key)
        assert (None if got is None else got.tolist()) == model.get(key)
    assert len(buffer._backend._blobs) == len(model)


def test_a_value_takes_the_place_of_another_within_the_capacity() -> None:
    buffer = store(capacity=8192)
    for number in range(3):
        buffer.put("a", torch.full((10,), number))
    assert buffer.get("a").tolist() == [2] * 10  # type: ignore[union-attr]
    with pytest.raises(DeadlineExceeded):
        buffer.put("b", torch.zeros(1))
    buffer.put("a", None)
    buffer.put("b", torch.zeros(1))


def test_a_damaged_value_is_not_there() -> None:
    buffer = store()
    buffer.put("a", torch.ones(100))
    ((place, blob),) = buffer._backend._blobs.items()
    buffer._backend._blobs[place] = blob[:-1] + b"!"
    assert buffer.get("a") is None and buffer.counts()["corrupt"] == 1


def test_a_store_that_fails_is_a_miss_to_readers_and_an_error_to_writers() -> None:
    class Broken(CreatingDict):
        def get(self, key: str) -> Buffer | None:
            raise OSError("gone")

        def put(self, key: str, blob: Buffers) -> None:
            raise OSError("full")

    buffer = store(Broken(kvloom.Config()))
    assert buffer.get("a") is None
    with pytest.raises(BackendError, match="full"):
        buffer.put("a", torch.ones(1))
    assert buffer.counts() == {"failed": 2}


# -- blobs that somebody else put there --------------------------------------------------------------------------------

MASK = torch.ones(2, dtype=torch.bool)


def put_blob(buffer: Any, *tensors: torch.Tensor | None) -> str:
    """Put these under an id that sorts before all others."""
    place = f"kv-lookup/entry/{0:048x}"
    buffer._backend.put(place, blobs.seal(place, tensors))
    return place


@pytest.mark.parametrize(
    ("tokens", "roi"),
    [
        (torch.tensor(1), MASK),
        (ids(1, 2), torch.tensor(True)),
        (ids(1, 2), None),
        (None, MASK),
        (ids(1, 2), torch.ones(3, dtype=torch.bool)),
        (ids(1, 2), torch.ones(2).to(torch.float8_e4m3fn)),
        (ids(1, 2, 3, 4).view(2, 2).T, torch.ones(2, 2, dtype=torch.bool)),
        (torch.ones(2), MASK),
    ],
)
def test_what_is_no_entry_keeps_nobody_from_the_others(tokens: Any, roi: Any) -> None:
    buffer = lookup()
    put_blob(buffer, tokens, roi, None, None, None)
    put_in(buffer, [1, 2], mark=7)
    assert mark(buffer.drop_select(ids(1, 2), MASK)) == 7
    assert buffer.counts() == {"inserted": 1, "unreadable": 1, "taken": 1}


def test_a_place_that_cannot_be_listed_keeps_nobody_from_the_rest() -> None:
    class Partly(CreatingDict):
        partly = False

        def scan(self, prefix: str = "") -> Iterator[kvloom.Entry]:
            yield from super().scan(prefix)
            if self.partly:
                raise kvloom.IncompleteListingError("1 places cannot be read")

    backend = Partly(kvloom.Config())
    buffer = lookup(backend)
    put_in(buffer, [1], mark=7)
    backend.partly = True
    with pytest.raises(BackendError, match="1 places cannot be read"):  # it may have no room
        put_in(buffer, [2])
    assert mark(buffer.drop_select(ids(1), MASK[:1])) == 7 and buffer.counts()["failed"] > 0


def test_an_entry_has_five_tensors() -> None:
    buffer = lookup()
    put_blob(buffer, ids(1), MASK[:1])
    put_in(buffer, [1], mark=7)
    assert mark(buffer.drop_select(None, None)) == 7 and buffer.counts()["unreadable"] == 1


def test_tokens_that_are_not_there_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = lookup(capacity=4 * MIB)
    place = put_blob(buffer, torch.zeros(MIB, dtype=torch.uint8), torch.ones(MIB, dtype=torch.bool))
    buffer._backend._blobs[place] = buffer._backend._blobs[place][:8192]
    wanted: list[int] = []

    def get_range(self: DictBackend, key: str, offset: int, into: memoryview) -> bool:
        wanted.append(len(into))
        return kvloom.StorageBackend.get_range(self, key, offset, into)

    monkeypatch.setattr(CreatingDict, "get_range", get_range)
    assert buffer.drop_select(ids(0), MASK[:1]) == NOTHING
    assert buffer.counts() == {"corrupt": 1, "missed": 1} and max(wanted) <= 8192


def test_longer_tokens_than_any_prompt_has(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = lookup()
    put_in(buffer, [1, 2, 3])
    monkeypatch.setattr("kvloom_connector_vllm.buffers.lookup._MOST_PREFIX_BYTES", 26)
    assert buffer.drop_select(ids(1), MASK[:1]) == NOTHING and buffer.counts()["corrupt"] == 1
    with pytest.raises(ValueError, match="input_tokens: 27 bytes with roi; an entry has 26 at most"):
        put_in(buffer, [1, 2, 3])
    put_in(buffer, [1, 2])


# -- what is refused ---------------------------------------------------------------------------------------------------


class Evicting(CreatingDict):
    type = "evicting"
    bounded = True


class Listless(CreatingDict):
    type = "listless"
    scan = kvloom.StorageBackend.scan


@pytest.mark.parametrize("make", [lookup, store])
@pytest.mark.parametrize(
    ("cls", "why"),
    [(DictBackend, "'dict' cannot create a key exclusively"), (Evicting, "evicts"), (Listless, "cannot list")],
)
def test_backends_that_will_not_do_are_refused(make: Callable[..., Any], cls: type[DictBackend], why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^backend: .*{why}.*; use one that implements `create`"):
        make(cls(kvloom.Config()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": {"type": "dict"}}, r"^backend: 'dict' cannot create a key exclusively"),
        ({"backend": {"path": "x"}}, r"^backend: expected a StorageBackend or a block with a `type`"),
        ({"capacity": 0}, r"^capacity: must be more than 0"),
        ({"capacity": "lots"}, r"^capacity: "),
        ({"timeout": -1}, r"^timeout: must be 0 or more"),
        ({"timeout": "soon"}, r"^timeout: "),
        ({"abandoned": 0}, r"^abandoned: must be more than 0"),
        ({"name": "a/b"}, r"^name: 'a/b' cannot be part of a key"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lookup(**settings)


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(kvloom.PluginError, match="no backend of type 'nothing'"):
        lookup({"type": "nothing"})


def test_units_as_in_yaml() -> None:
    buffer = lookup(capacity="4GiB", timeout="250ms")
    assert (buffer.capacity, buffer.timeout) == (2**32, 0.25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ids(1), ids(1, 1)), "roi: expected a 1-D mask of 1 entries"),
        ((torch.ones(2), None), "input_tokens: expected a 1-D integer tensor"),
        ((torch.ones(2, 2, dtype=torch.int64), None), "input_tokens: expected a 1-D"),
        ((None, ids(1)), "input_tokens: None takes any entry"),
    ],
)
def test_questions_that_mean_nothing(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lookup().drop_select(*arguments)


def test_entries_that_nobody_could_ask_for() -> None:
    with pytest.raises(ValueError, match="roi: selects no token"):
        put_in(lookup(), [1, 2], [0, 0])
    with pytest.raises(TypeError, match=r"value: expected a torch\.Tensor, got list"):
        lookup().insert(ids(1), ids(1), torch.ones(1), [1], torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="key: expected a str"):
        store().get(7)  # type: ignore[arg-type]


VLLM = """
class KVStoreBufferBase: pass
class KVLookupBufferBase: pass
"""


def test_they_are_vllms_where_it_has_them(tmp_path: Path) -> None:
    place = tmp_path / "vllm/distributed/kv_transfer/kv_lookup_buffer"
    place.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("")
    (place / "base.py").write_text(VLLM)

    def bases(pipe: Connection) -> None:
        for name in [name for name in sys.modules if name.startswith("kvloom_connector_vllm.")]:
            del sys.modules[name]
        sys.path.insert(0, str(tmp_path))
        from kvloom_connector_vllm.buffers import KVLookupBuffer, KVStoreBuffer

        pipe.send([cls.__mro__[2].__module__ for cls in (KVLookupBuffer, KVStoreBuffer)])

    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=bases, args=(there,))
    process.start()
    there.close()
    assert here.recv() == ["vllm.distributed.kv_transfer.kv_lookup_buffer.base"] * 2
    process.join()
