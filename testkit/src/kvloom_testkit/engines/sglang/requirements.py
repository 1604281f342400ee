"""The requirements of storages of SGLang's HiCache."""

from __future__ import annotations

from typing import Any

from kvloom_testkit.engines.base import NotApplicableError, expect
from kvloom_testkit.engines.damage import damage
from kvloom_testkit.engines.process import Engine, RefusedError
from kvloom_testkit.engines.rename_barrier import rename_together
from kvloom_testkit.engines.sglang.storages import StorageBench
from kvloom_testkit.engines.slow_writes import write_while_read
from kvloom_testkit.running import comes_true

PAGES = list(range(8))
_MORE = [*PAGES, 100, 101]
"""Pages that are stored, and two that are not."""
_KEPT = "kept"
_GROWTH = 4
_LONGEST_SECONDS = 1.0
_SAVED_SECONDS = 3.0


class StorageConformance:
    """A storage of HiCache: `kvloom check engine sglang --storage MODULE:CLASS --extra '{...}'`.

    SGLang's own factory makes it, and it is called as SGLang's cache controller calls it: by rows of the host pool if
    `extra` has `interface_v1`, or else by copies of pages. The engine is not in front of it, so that no GPU is needed.
    """

    def test_H01_opens(self, bench: StorageBench) -> None:
        """SGLang's factory makes the storage, and it says that it has nothing.

        Why: nothing else can be tried without it.

        Usually: a constructor with other arguments, a setting that is missing, or a server that is not there.
        """
        found = bench.open("empty").call("exists", pages=PAGES)
        expect(not found, f"{found} pages of an empty store are said to be there")

    def test_H02_gives_back_what_was_stored(self, bench: StorageBench) -> None:
        """Pages come back bit for bit, in any order and at any place of the host pool.

        Why: wrong KV gives fluent answers to another question, and no error.

        Usually: rows of the pool taken for pages, or a layout other than the one that is assumed.
        """
        for layout in ("page_first", "layer_first"):
            engine = _filled(bench, f"layout-{layout}", layout=layout)
            for pages, at in ((PAGES, None), (PAGES[::-1], [9, 3, 20, 1, 30, 11, 0, 17]), (PAGES[2:3], [31])):
                _expect_right(engine.call("get", pages=pages, at=at), f"with the layout {layout}, ")

    def test_H03_changes_only_what_it_loads(self, bench: StorageBench) -> None:
        """Loading writes to no other page of the host pool.

        Why: all others belong to other requests.

        Usually: an index off by one, or a batch that is written in one piece from its first page on.
        """
        engine = _filled(bench, "others")
        others = engine.call("get", pages=PAGES, at=[9, 3, 20, 1, 30, 11, 0, 17])["others"]
        expect(not others, f"{others} other pages of the pool were written to")

    def test_H04_counts_leading_pages(self, bench: StorageBench) -> None:
        """`batch_exists` is the number of pages in front of the first that is not there.

        Why: what is behind a gap cannot be used, and SGLang reserves memory for as many.

        Usually: all that are there are counted, or the last that is there is looked for.
        """
        engine = _filled(bench, "leading")
        for pages, count in ((PAGES, 8), (_MORE, 8), ([0, 1, 100, 2, 3], 2), ([100, 0], 0), ([], 0)):
            found = engine.call("exists", pages=pages)
            expect(found == count, f"of pages {pages}, {found} are said to lead; it is {count}")

    def test_H05_says_what_is_missing(self, bench: StorageBench) -> None:
        """Of pages that are asked together, those that are not there are said to be missing, and the others are right.

        Why: SGLang computes what is missing, and uses the rest.

        Usually: an exception, one answer for all, or memory that was not filled.
        """
        engine = _filled(bench, "missing")
        found = engine.call("get", pages=[0, 100, 1, 101, 2])["pages"]
        expect(found[1] == found[3] == "missing", f"pages 1 and 3 of 5 are not there; they are said to be {found}")
        expect("wrong" not in found, f"pages came back as {found}")

    def test_H06_may_be_stored_twice(self, bench: StorageBench) -> None:
        """A page that is there already may be stored again, alone and among others.

        Why: two requests with one prompt store the same pages, and two servers do.

        Usually: an exception, or a failure that ends the whole batch.
        """
        engine = _filled(bench, "twice")
        said = engine.call("set", pages=[0, 1, 50])
        expect(all(said), f"storing two pages again and a new one was said to be {said}")
        _expect_right(engine.call("get", pages=[0, 1, 50]), "stored twice, ")

    def test_H07_another_process_finds_it(self, bench: StorageBench) -> None:
        """A new process on the same store has what another has stored.

        Why: a store that outlives the process is the point of having one.

        Usually: keys from `hash()`, or an index that is in memory only.
        """
        engine = _reopened(bench, fresh=True)
        expect(engine.call("exists", pages=PAGES) == len(PAGES), "not all pages are there in a new process")
        _expect_right(engine.call("get", pages=PAGES), "in a new process, ")

    def test_H08_two_processes_at_once_are_right(self, bench: StorageBench) -> None:
        """Two processes that store and load the same pages at the same time load them right.

        Why: replicas of a server share a store, and what one writes another reads in the same moment.

        Usually: a draft of a file under a name that both use, or an entry that is there before its bytes are. A file
        that one process writes is kept empty here while the other reads.
        """
        _need_store(bench)
        both = bench.open("both"), bench.open("both")
        for number in range(2 if bench.short else 6):
            pages = [300 + 10 * number + page for page in range(3)]
            read = {"pages": pages, "stores": bool(number % 2)}
            for found in write_while_read(*both, bench.store("both"), number, write={"pages": pages}, read=read):
                wrong = f"{found.count('wrong')} of {len(found)} pages were loaded wrong"
                expect("wrong" not in found, f"{wrong} while another process wrote them")
        rename_together(both, bench.store("both"))
        waiting = [one.begin("race", pages=PAGES, seconds=0.5 if bench.short else 3.0) for one in both]
        faults = [fault for wait in waiting for fault in wait()]
        expect(not faults, f"{len(faults)} times: {'; '.join(faults[:2])}")

    def test_H09_threads_at_once_are_right(self, bench: StorageBench) -> None:
        """Pages may be stored by one thread while another loads them.

        Why: SGLang has a thread for each.

        Usually: one connection or buffer for both.
        """
        faults = bench.open("threads").call("race", pages=PAGES, seconds=0.5 if bench.short else 3.0)
        expect(not faults, "; ".join(faults))

    def test_H10_other_models_do_not_meet(self, bench: StorageBench) -> None:
        """A storage that was opened for another model has nothing of this one's.

        Why: SGLang's keys cover tokens only, so its answers would come from the other's KV, with no error.

        Usually: keys without the model.
        """
        _expect_none(_reopened(bench, model="another/model"), "of another model")

    def test_H11_types_do_not_meet(self, bench: StorageBench) -> None:
        """A storage whose pool is float16 has nothing of what was stored as bfloat16, which has pages of the same size.

        Why: the same bytes are other numbers.

        Usually: keys without the type of the pool.
        """
        _expect_none(_reopened(bench, dtype="float16"), "in bfloat16")

    def test_H12_page_sizes_do_not_meet(self, bench: StorageBench) -> None:
        """A storage whose pool has pages of twice the size gives nothing of what was stored in smaller ones.

        Why: a file of another size that is read into a page leaves half of it as it was.

        Usually: keys without the size, or a size that is not compared.
        """
        _expect_none_loaded(_reopened(bench, page_size=8), "in pages of half the size")

    def test_H13_layouts_do_not_meet(self, bench: StorageBench) -> None:
        """A storage whose pool has another layout has nothing, or what is right for it.

        Why: the same bytes are the KV of other layers.

        Usually: pages are stored as they lie in memory, under keys without the layout.
        """
        _expect_none_loaded(_reopened(bench, layout="layer_first"), "in another layout")

    def test_H14_ranks_do_not_meet(self, bench: StorageBench) -> None:
        """Each of two ranks has its own pages under the same keys.

        Why: each has other heads of the same tokens.

        Usually: keys without the rank, or without the number of ranks.
        """
        engine = _reopened(bench, ranks=[1, 2])
        _expect_none(engine, "of one rank")
        engine.call("set", pages=[60])
        _expect_none(bench.open(_KEPT, ranks=[0, 2]), "of another rank", pages=[60])

    def test_H15_latents_are_stored_once(self, bench: StorageBench) -> None:
        """With latents, which each rank has alike, what the first rank stores the second loads.

        Why: it is the same KV, and the second rank is not told to store it.

        Usually: keys with the rank of a model whose ranks have the same.
        """
        first = bench.open("latents", ranks=[0, 2], latents=True)
        second = bench.open("latents", ranks=[1, 2], latents=True)
        first.call("set", pages=PAGES)
        found = 0

        def there() -> bool:  # storages may save in the background, and nothing says when they have
            nonlocal found
            found = second.call("exists", pages=PAGES)
            return found == len(PAGES)

        expect(comes_true(there, _SAVED_SECONDS), f"the second rank has {found} of {len(PAGES)} pages")
        _expect_right(second.call("get", pages=PAGES), "on the second rank, ")

    def test_H16_altered_data_is_missing(self, bench: StorageBench) -> None:
        """Pages are right or missing where bits of all files are flipped.

        Why: disks, networks and other programs change bytes, and nothing in SGLang can tell.

        Usually: no checksum.
        """
        _expect_no_wrong(_damaged(bench, "flip"), "from altered files")

    def test_H17_cut_data_is_missing(self, bench: StorageBench) -> None:
        """Pages are right or missing, and nothing raises, where all files are cut in half.

        Why: a server that is killed while it writes leaves such files, and a full disk does.

        Usually: as many bytes as there are read into a page; or an exception, after which SGLang's thread is gone.
        """
        _expect_no_wrong(_damaged(bench, "cut"), "from files that were cut")

    def test_H18_lost_data_is_missing(self, bench: StorageBench) -> None:
        """Pages are missing, and nothing raises, where files vanish after they were said to be there.

        Why: a store that others share evicts between the question and the read.

        Usually: an exception, after which SGLang's thread is gone until the server is started again.
        """
        engine = _reopened(bench, "lost")
        engine.call("exists", pages=PAGES)
        damage(bench.store("lost"), "remove")
        _expect_no_wrong(engine, "after all files were removed")

    def test_H19_clear_leaves_nothing(self, bench: StorageBench) -> None:
        """After `clear`, nothing that was stored before is found.

        Why: it is called when weights change, and old KV is wrong from then on.

        Usually: an index that is cleared and a store that is not.
        """
        engine = _filled(bench, "cleared")
        if not engine.call("clears"):
            raise NotApplicableError("it has no clear")
        if not engine.call("clear"):
            raise NotApplicableError("its clear says that it did not")
        _expect_none(engine, "before it was cleared")

    def test_H20_threads_and_files_do_not_grow(self, bench: StorageBench) -> None:
        """The process has no more threads and open files after many calls than after some.

        Why: both are limited, and what reaches the limit first is the engine's own socket.

        Usually: a thread or a file for each call, closed when it is collected.
        """
        engine = _filled(bench, "many")
        states = []
        for turn in range(2):
            for call in range(20 if bench.short else 100):
                engine.call("set", pages=[200 + 100 * turn + call])
                engine.call("get", pages=_MORE)
            states.append(engine.call("state"))
        for name in ("threads", "descriptors"):
            text = f"{states[0][name]} {name} after some calls, {states[1][name]} after as many again"
            expect(states[1][name] - states[0][name] <= _GROWTH, text)

    def test_H21_calls_do_not_take_long(self, bench: StorageBench) -> str:
        """No call for eight small pages takes longer than a second.

        Why: SGLang has one thread for loads, and every request waits for it.

        Usually: a wait for the store with no deadline, or a connection for each page.
        """
        engine = bench.open("quick")
        seconds = min(engine.call("longest", pages=PAGES) for _ in range(3))
        expect(seconds <= _LONGEST_SECONDS, f"a call took {seconds:.2f} s, and no less in 3 tries")
        return f"{1000 * seconds:.1f} ms at most"


def _filled(bench: StorageBench, store: str, **settings: Any) -> Engine:
    """A storage with `PAGES`."""
    engine = bench.open(store, **settings)
    said = engine.call("set", pages=PAGES)
    expect(all(said), f"storing {len(PAGES)} pages was said to be {said}")
    return engine


def _reopened(bench: StorageBench, store: str = _KEPT, *, fresh: bool = False, **settings: Any) -> Engine:
    """A storage with other settings, on a store that one with the usual ones has filled."""

    def work() -> bool:
        _filled(bench, _KEPT)
        bench.end_session()
        return True

    _need_store(bench)
    bench.once(_KEPT, work)
    if store != _KEPT:
        bench.copy_of(_KEPT, store)
    try:
        return bench.open(store, fresh=fresh, **settings)
    except RefusedError as error:
        raise NotApplicableError(f"it refuses such a pool: {error}") from error


def _damaged(bench: StorageBench, how: str) -> Engine:
    _need_store(bench)
    _reopened(bench)
    bench.end_session()
    if not damage(bench.copy_of(_KEPT, how), how):
        raise NotApplicableError("there are no files in its directory")
    return bench.open(how)


def _need_store(bench: StorageBench) -> None:
    if not bench.subject.has_store:
        raise NotApplicableError("no setting has {tmp}: there is no store to open again")


def _expect_right(found: dict[str, Any], said: str) -> None:
    wrong = [one for one in found["pages"] if one != "right"]
    expect(not wrong, f"{said}{len(wrong)} of {len(found['pages'])} pages came back as {', '.join(sorted(set(wrong)))}")


def _expect_none(engine: Engine, of: str, pages: list[int] = PAGES) -> None:
    found = engine.call("exists", pages=pages)
    expect(not found, f"{found} pages are said to be there that were stored {of}")
    _expect_none_loaded(engine, of, pages)


def _expect_none_loaded(engine: Engine, of: str, pages: list[int] = PAGES) -> None:
    """None but what happens to be right for it."""
    found = engine.call("get", pages=pages)["pages"]
    expect("wrong" not in found, f"{found.count('wrong')} pages were loaded that were stored {of}")


def _expect_no_wrong(engine: Engine, said: str) -> None:
    found = engine.call("get", pages=PAGES)["pages"]
    expect("wrong" not in found, f"{found.count('wrong')} of {len(PAGES)} pages were loaded wrong {said}")
