"""Removals: what was under way when one began, or while it lasted, is hit; what began after it is not."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom import ChunkKey
from kvloom.runtime import SystemRuntime
from kvloom.tiers.invalidation import Invalidations


def key(name: int, *, tag: str = "a", fingerprint: str = "f") -> ChunkKey:
    return ChunkKey(f"{fingerprint}/{tag}", name, name.to_bytes(32, "big"))


@pytest.fixture
def removals() -> Invalidations:
    return Invalidations(SystemRuntime())


def test_what_is_being_removed_is_hit_whenever_it_began(removals: Invalidations) -> None:
    with removals.removing([key(1), key(2)]):
        assert [removals.hit(key(name), removals.mark()) for name in (1, 2, 3)] == [True, True, False]
        meanwhile = removals.mark()
    assert removals.hit(key(1), meanwhile), "some tier still had it"
    assert not removals.hit(key(1), removals.mark()) and not removals.hit(key(3), meanwhile)


@pytest.mark.parametrize("same", [True, False])
def test_one_that_ends_does_not_end_another(removals: Invalidations, same: bool) -> None:
    with ExitStack() as long:
        long.enter_context(removals.removing([key(1)]))
        with removals.removing([key(1 if same else 2)]):
            pass
        assert removals.hit(key(1), removals.mark())
        assert not removals.hit(key(2), removals.mark())
    assert not removals.hit(key(1), removals.mark())


def test_one_that_fails_counts(removals: Invalidations) -> None:
    before = removals.mark()
    with pytest.raises(OSError, match="no route"), removals.removing([key(1)]):
        raise OSError("no route")
    assert removals.hit(key(1), before), "it may have been removed from some tiers"
    assert not removals.hit(key(1), removals.mark())


def test_clearing_is_by_salt_or_by_model(removals: Invalidations) -> None:
    all_keys = [key(1), key(1, tag="b"), key(1, fingerprint="g"), key(1, tag="ab")]
    before = removals.mark()
    with removals.clearing("f/a/"):
        assert [removals.hit(one, removals.mark()) for one in all_keys] == [True, False, False, False]
    assert [removals.hit(one, before) for one in all_keys] == [True, False, False, False]
    before = removals.mark()
    with removals.clearing("f/"):
        assert [removals.hit(one, removals.mark()) for one in all_keys] == [True, True, False, True]
    assert [removals.hit(one, before) for one in all_keys] == [True, True, False, True]


def test_many_removals_do_not_hit_others(removals: Invalidations) -> None:
    before = removals.mark()
    for name in range(2000):
        with removals.removing([key(name)]):
            pass
    assert removals.hit(key(0), before) and removals.hit(key(1999), before)
    assert not removals.hit(key(2000), before), "however much else was removed meanwhile"


def test_what_cannot_be_told_any_more_counts_as_removed() -> None:
    removals = Invalidations(SystemRuntime(), most=2)
    before = removals.mark()
    with removals.removing([key(1)]):
        pass
    after = removals.mark()
    assert removals.hit(key(1), before) and not removals.hit(key(9), before)
    for tag in "cd":
        with removals.clearing(f"f/{tag}/"):
            pass
    assert removals.hit(key(9, fingerprint="x"), before), "something was, nobody knows what"
    assert not removals.hit(key(9), after) and removals.hit(key(9, tag="c"), after)
    assert len(removals._log._moments) == 2


SALTS = ("a", "b", "c")
_steps = st.one_of(
    st.tuples(st.just("mark")),
    st.tuples(st.just("begin"), st.sets(st.tuples(st.integers(0, 3), st.sampled_from(SALTS)), min_size=1)),
    st.tuples(st.just("begin"), st.sampled_from(["f/", "f/a/", "f/b/", "g/"])),
    st.tuples(st.just("end"), st.integers(0, 3)),
)


@given(st.lists(_steps, max_size=30), st.integers(1, 4))
def test_nothing_that_was_removed_since_a_mark_is_missed(steps: list, most: int) -> None:
    """Against a list of all removals. With enough room to remember nothing else is hit either."""
    everything = [key(name, tag=tag) for name in range(4) for tag in SALTS]
    roomy, narrow = Invalidations(SystemRuntime()), Invalidations(SystemRuntime(), most=most)
    marks: list[tuple[int, int, int]] = []
    history: list[set[ChunkKey]] = []
    open_now: list[tuple[ExitStack, set[ChunkKey]]] = []
    for step in [("mark",), *steps]:
        if step[0] == "mark":
            marks.append((len(history), roomy.mark(), narrow.mark()))
        elif step[0] == "begin":
            what, both = step[1], ExitStack()
            if isinstance(what, str):
                keys = {one for one in everything if f"{one.namespace}/".startswith(what)}
            else:
                keys = {key(name, tag=tag) for name, tag in what}
            for one in (roomy, narrow):
                both.enter_context(one.clearing(what) if isinstance(what, str) else one.removing(keys))
            open_now.append((both, keys))
        elif open_now:
            both, keys = open_now.pop(step[1] % len(open_now))
            both.close()
            history.append(keys)
        for place, mark, narrow_mark in marks:
            under_way = [keys for _, keys in open_now]
            hit = set().union(*history[place:], *under_way)
            assert {one for one in everything if roomy.hit(one, mark)} == hit
            assert {one for one in everything if narrow.hit(one, narrow_mark)} >= hit
