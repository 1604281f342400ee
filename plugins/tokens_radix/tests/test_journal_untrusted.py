"""A journal that others may have written does no more harm than losing hits, and is not waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import tracemalloc
from array import array
from pathlib import Path

import pytest
from radix_support import cuts, journals, learnt, packed, prompts, radix, tokens_of

from kvloom_tokens_radix.cutting import Rules
from kvloom_tokens_radix.records import MAGIC, DamagedError, Replay, record
from kvloom_tokens_radix.tree import Change, Cut, Leaf, Root, Split, Tree


def edge(*first: int, length: int = 4) -> bytes:
    return packed((*first, *range(length - len(first))))


def crafted(*changes: Change, before: bytes = b"", tree: Tree | None = None) -> Tree:
    """The tree that changes make which no tree has written."""
    tree = tree or Tree(Rules(16, 4, 4), 1 << 20)
    with contextlib.suppress(DamagedError):
        Replay(tree).apply(before + record(changes)[12:])
    return tree


ROOT, BRANCH, LEAF = Root(1, ""), Leaf(2, 1, b"", b"", edge(1)), Leaf(3, 2, b"", b"", edge(2))


def test_a_parent_that_is_older_than_its_children_is_no_error(tmp_path: Path) -> None:
    database = radix(path=tmp_path, memory="64KiB")
    database.learn(tokens_of(300))
    database.close()
    (file,) = journals(tmp_path)
    large = Leaf(4, 1, b"", b"", edge(9, length=20_000))
    file.write_bytes(MAGIC + record([ROOT, BRANCH, LEAF]) + record([Cut(2, 0, 4)], before=b"*") + record([large]))
    database = radix(path=tmp_path, memory="64KiB")
    database.segments(tokens_of(300))
    database.learn(tokens_of(300))
    database.close()

    tree = crafted(ROOT, BRANCH, LEAF)
    tree._order.move_to_end(next(node for node in tree.nodes() if node.id == 2), last=False)
    tree.memory_bytes = 0
    assert [change.id for change in tree.shrink()] == [3, 2, 1]


def test_whatever_a_replay_raises_is_a_fresh_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = prompts(3)
    learnt(tmp_path, asked)
    apply = Replay.apply

    def broken(self: Replay, *args: object, **options: object) -> None:
        apply(self, *args, **options)  # type: ignore[arg-type]
        raise AssertionError("odd")

    with monkeypatch.context() as patch:
        patch.setattr(Replay, "apply", broken)
        assert cuts(tmp_path, asked) == cuts(tmp_path / "other", asked), "nothing of it is kept"
    assert "odd" in caplog.text


@pytest.mark.parametrize("part", ["journal", "draft", "lock"])
@pytest.mark.parametrize("kind", ["fifo", "directory", "link"])
def test_special_files_are_not_waited_for(tmp_path: Path, part: str, kind: str) -> None:
    asked = prompts(3)
    expected = learnt(tmp_path, asked)
    path = journals(tmp_path)[0].with_suffix(f".{part}")
    path.unlink(missing_ok=True)
    {"fifo": os.mkfifo, "directory": Path.mkdir, "link": lambda path: path.symlink_to("nothing")}[kind](path)
    signal.alarm(60)  # whoever waits for the writer of a FIFO waits for ever
    assert learnt(tmp_path, asked) == expected
    signal.alarm(0)


@pytest.mark.parametrize("part", ["journal", "lock"])
@pytest.mark.parametrize(("directory", "file"), [(0o755, 0o600), (0o775, 0o660), (0o777, 0o666)])
def test_who_cannot_write_can_neither_read_nor_lock(tmp_path: Path, part: str, directory: int, file: int) -> None:
    """A journal has prompts and salts. Who held all locks would have each start begin another file."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept").chmod(directory)
    learnt(tmp_path / "kept", prompts(3))
    (path,) = (tmp_path / "kept").glob(f"*.{part}")
    assert path.stat().st_mode & 0o777 == file
    path.chmod(0o644)  # of an earlier release
    learnt(tmp_path / "kept", prompts(4))
    assert path.stat().st_mode & 0o777 == file


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to a group of nobody's")
@pytest.mark.parametrize("part", ["journal", "lock"])
def test_the_group_that_may_read_is_the_one_that_may_write(tmp_path: Path, part: str) -> None:
    (tmp_path / "kept").mkdir()
    os.chown(tmp_path / "kept", -1, 12345)
    (tmp_path / "kept").chmod(0o775)
    learnt(tmp_path / "kept", prompts(3))
    (path,) = (tmp_path / "kept").glob(f"*.{part}")
    assert (path.stat().st_gid, path.stat().st_mode & 0o777) == (12345, 0o660)


def test_a_record_longer_than_any_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learnt(tmp_path, prompts(3))
    (file,) = journals(tmp_path)
    file.write_bytes(MAGIC + b"\xff\xff\xff\xff" + bytes(8))
    os.truncate(file, 1 << 43)
    tracemalloc.start()
    try:
        cuts(tmp_path, prompts(3))
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
    assert "a record of 4294967295 bytes" in caplog.text


def test_what_a_journal_says_takes_no_more_memory_than_there_is() -> None:
    tree = Tree(Rules(16, 4, 4), 64 << 10)
    replay = Replay(tree)
    most = []
    look = replay._look

    def looked(most_bytes: int) -> None:
        most.append(len(tree))
        look(most_bytes)

    replay._look = looked  # type: ignore[method-assign]
    replay.apply(record([Root(id, str(id)) for id in range(1, 5_000)])[12:])
    assert max(most) < 1_000 and len(replay._nodes) < 2_000


def test_it_is_not_read_for_ever() -> None:
    replay = Replay(Tree(Rules(16, 4, 4), 1 << 20), go_on=lambda: False)
    with pytest.raises(DamagedError, match="too long"):
        replay.apply(record([ROOT])[12:])


def test_time_is_looked_at_after_each_change() -> None:
    tree = Tree(Rules(16, 4, 4), 1 << 20)
    replay = Replay(tree, go_on=lambda: len(tree) < 2)
    with pytest.raises(DamagedError, match="too long"):
        replay.apply(record([ROOT, BRANCH, LEAF])[12:])
    assert len(tree) == 2


def test_a_cut_is_not_compared_with_all_of_its_node() -> None:
    class Ends(array):  # type: ignore[type-arg]
        def __contains__(self, end: object) -> bool:
            raise AssertionError("there may be millions")

    tree = crafted(ROOT, Leaf(2, 1, packed((4, 8)), packed((0, 4)), edge(1, length=16)))
    node = tree.nodes()[-1]
    node.ends = Ends("i", node.ends)
    with pytest.raises(ValueError, match="not a cut"):
        tree.add_cut(node, 4, 8)
    tree.add_cut(node, 8, 12)
    assert list(node.ends) == [4, 8, 12]


@pytest.mark.parametrize(
    "change",
    [
        Leaf(1 << 63, 2, b"", b"", edge(5)),
        Leaf(5, 2, packed((6,)), packed((0,)), edge(5)),
        Leaf(5, 2, packed((24,)), packed((0,)), edge(5, length=40)),  # in chunks of 16
        Cut(2, 0, 3),
        Split(2, 1 << 62, 1),
        Root(0, "x"),
    ],
)
def test_what_no_tree_has_is_left_out(change: Change) -> None:
    tree = crafted(ROOT, BRANCH, LEAF)
    before = [(node.id, node.edge, node.ends) for node in tree.nodes()]
    replay = Replay(tree)
    replay._nodes = {node.id: node for node in tree.nodes()}
    replay.apply(record([change])[12:])
    assert [(node.id, node.edge, node.ends) for node in tree.nodes()] == before
