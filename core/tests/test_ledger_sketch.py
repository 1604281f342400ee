"""Counting uses in a few bytes: never too few, seldom too many, half as many after a while, and growing."""

from __future__ import annotations

from hashlib import sha256

from kvloom.tiers.index.frequency import Sketch


def digests(count: int, kind: str = "a") -> list[bytes]:
    return [sha256(f"{kind}{number}".encode()).digest() for number in range(count)]


def test_few_keys_are_counted_exactly() -> None:
    sketch = Sketch()
    some = digests(50)
    for number, digest in enumerate(some):
        sketch.add([digest] * number, rows=1000)
    assert [sketch.uses(digest) for digest in some] == list(range(50))


def test_many_keys_are_never_counted_too_seldom_and_little_too_often() -> None:
    sketch = Sketch()
    often, once = digests(400, "often"), digests(4000, "once")
    for _ in range(5):
        sketch.add(often, rows=4000)
    sketch.add(once, rows=4000)
    sketch.add(often, rows=4000)
    assert all(sketch.uses(digest) >= 6 for digest in often)
    assert all(sketch.uses(digest) >= 1 for digest in once)
    assert sum(sketch.uses(digest) for digest in often) < 6.1 * len(often)
    assert sum(sketch.uses(digest) for digest in once) < 1.5 * len(once)
    assert sum(sketch.uses(digest) for digest in digests(1000, "never")) < 400


def test_there_is_a_most() -> None:
    sketch = Sketch()
    (digest,) = digests(1)
    sketch.add([digest] * 1000, rows=1000)
    assert sketch.uses(digest) == 255


def test_what_was_used_long_ago_counts_less_and_less() -> None:
    sketch = Sketch()
    often, others = digests(20), digests(10_000, "others")
    sketch.add(often * 200, rows=1024)
    for digest in others[:6239]:
        sketch.add([digest], rows=1024)
    assert all(sketch.uses(digest) >= 200 for digest in often), "10,239 uses"
    sketch.add(others[:1], rows=1024)
    assert all(100 <= sketch.uses(digest) < 110 for digest in often)
    for digest in others[:9000]:
        sketch.add([digest], rows=1024)
    assert all(sketch.uses(digest) >= 100 for digest in often), "it is halved once for ten uses a row"
    for _ in range(8):
        sketch.add(others, rows=1024)
        sketch.add(others[:300], rows=1024)
    assert all(sketch.uses(digest) < 30 for digest in often)


def test_growing_forgets_nothing_and_goes_on_page_by_page() -> None:
    sketch = Sketch()
    some, more = digests(3000), digests(20_000, "more")
    sketch.add(some, rows=3000)
    sketch.add(some, rows=3000)
    for pages in range(1, 12):
        assert len(sketch._pages) == pages
        assert all(sketch.uses(digest) >= 2 for digest in some)
        sketch.add(more[2000 * pages - 2000 : 2000 * pages - 1000], rows=4096 * pages + 1)
    sketch.add([], rows=4096 * 12)
    assert len(sketch._pages) == 12
    assert sum(sketch.uses(digest) for digest in digests(1000, "never")) < 500
    for digest in more:
        sketch.add([digest] * 3, rows=4096 * 12)
    assert all(sketch.uses(digest) >= 3 for digest in more)


def test_every_page_is_aged() -> None:
    sketch = Sketch()
    for _ in range(9):
        sketch.add([], rows=9 * 4096)
    some = digests(2000)
    for _ in range(8):
        sketch.add(some, rows=9 * 4096)
    sketch.add(some[:1] * (10 * 9 * 4096 - 16_000), rows=9 * 4096)
    for _ in range(9):
        sketch.add([], rows=9 * 4096)
    assert len(sketch._pages) == 9
    assert all(sketch.uses(digest) == 4 for digest in some[1:] if sketch.uses(digest) < 100)
