"""A tree's journal: a thread writes new sequences in the background, so that they survive a restart.

Nothing is synced: a power cut may lose the newest records, which only costs hits. Errors here are also logged, and
never raised.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from kvloom import one_line
from kvloom_tokens_radix import slots
from kvloom_tokens_radix.records import MAGIC, DamagedError, Replay, payloads, record, snapshot
from kvloom_tokens_radix.tree import Change, Leaf, Tree

logger = logging.getLogger("kvloom.tokens_radix")

_WAITING_BYTES = 16 << 20
"""Maximum size of queued writes; beyond it the file is rewritten instead."""
_SMALL_BYTES = 1 << 20
_RETRY_SECONDS = 60.0
_CLOSE_SECONDS = 5.0
_LOAD_SECONDS = 10.0
"""Maximum time to read a file; the rest is left out. A whole one takes less than a second."""
_HANG_FACTOR = 2
"""Multiple of that after which the file system counts as hung."""
_BATCH = 64
"""Nodes in one record of a file that is written anew."""
_SNAPSHOT = b"*"
"""Before the payload of such a record: its nodes are in the order of their use, the latest first."""


class Journal:
    """The journal of one tree. `lock` guards the tree; callers of `loaded` and `add` hold it."""

    def __init__(self, directory: Path, name: str, lock: threading.Lock) -> None:
        self._directory = directory
        self._name = name
        self._changed = threading.Condition(lock)
        self._waiting: list[Sequence[Change]] = []
        self._waiting_bytes = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._slot: slots.Slot | None = None
        # From here on used by the thread alone, once there is one.
        self._fd = -1
        self._bytes = 0
        self._limit_bytes = 0
        self._anew = True
        self._retry_at = 0.0
        self._tree: Tree

    def load(self, tree: Tree) -> Tree:
        """The tree of the saved sequences; `tree`, which is empty, if they cannot be read in time.

        On a thread: calls of a network file system may never return, and then nothing is saved either.
        """
        self._tree = tree
        ended, results = threading.Lock(), list[tuple[Tree, slots.Slot | None, int]]()
        given_up = False

        def work() -> None:
            loaded = Tree(tree.rules, tree.memory_bytes)
            slot, good_bytes = self._loaded(loaded)
            with ended:
                if not given_up:
                    results.append((loaded, slot, good_bytes))
                    return
            if slot is not None:
                slot.release()

        thread = threading.Thread(target=work, name="kvloom-radix-load", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the machine has no more threads
            work()
        else:
            thread.join(_HANG_FACTOR * _LOAD_SECONDS)
        with ended:
            given_up = not results
        if given_up:
            logger.warning("learnt prompts are not saved: %s does not answer", self._directory)
            return tree
        ((self._tree, self._slot, good_bytes),) = results
        if good_bytes:
            self._anew, self._bytes, self._limit_bytes = False, good_bytes, _limit(self._tree.nbytes)
        return self._tree

    def _loaded(self, tree: Tree) -> tuple[slots.Slot | None, int]:
        """Load into `tree`. The slot, if there is one, and the bytes of its file that may stay as they are."""
        try:
            slot, begin = slots.take(self._directory, self._name)
        except OSError as error:
            logger.warning("learnt prompts are not saved: %s: %s", self._directory, one_line(error))
            return None, 0
        if begin is None:
            return slot, 0
        try:
            good_bytes = self._replay(begin, tree)
        except Exception as error:
            logger.warning("starting afresh: cannot read %s: %s: %s", begin, type(error).__name__, one_line(error))
            tree.clear()
            return slot, 0
        return slot, good_bytes if slot is not None and slot.path == begin else 0

    def _replay(self, path: Path, tree: Tree) -> int:
        """The number of leading bytes of the file that are intact; 0 if none are."""
        until = time.monotonic() + _LOAD_SECONDS
        replay, good_bytes = Replay(tree, go_on=lambda: time.monotonic() < until), 0
        most_bytes = 2 * tree.memory_bytes + _WAITING_BYTES
        with open(slots.regular(path, os.O_RDONLY), "rb") as file:
            try:
                for payload, end in payloads(file, most_bytes=most_bytes):
                    whole = payload[:1] == _SNAPSHOT
                    replay.apply(payload[1:] if whole else payload, oldest_last=whole)
                    good_bytes = end
            except DamagedError as error:
                logger.warning(
                    "%s is damaged behind its first %d bytes, the rest is left out: %s",
                    path,
                    good_bytes,
                    one_line(error),
                )
        return good_bytes

    def add(self, changes: Sequence[Change]) -> None:
        """Write these, in a while."""
        if self._slot is None or self._closed:
            return
        self._waiting.append(changes)
        self._waiting_bytes += sum(len(each.edge) + 64 if isinstance(each, Leaf) else 64 for each in changes)
        if self._waiting_bytes > _WAITING_BYTES:
            self._waiting, self._waiting_bytes, self._anew = [], 0, True
        if self._thread is None and time.monotonic() >= self._retry_at:
            self._thread = threading.Thread(target=self._work, name="kvloom-radix-journal", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # the machine has no more threads
                self._thread, self._retry_at = None, time.monotonic() + _RETRY_SECONDS
                logger.warning("learnt prompts are not saved for a while: %s: %s", self._directory, one_line(error))
        self._changed.notify()

    def close(self) -> None:
        """Write what waits, within a few seconds. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_SECONDS)
            if thread.is_alive():
                return  # it hangs in the file system, and the lock goes with the process
        if self._slot is not None:
            self._slot.release()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
                closed = self._closed
            try:
                self._write(waiting)
            except Exception as error:
                logger.warning("learnt prompts are not saved for a while: %s: %s", self._directory, one_line(error))
                self._anew, self._retry_at = True, time.monotonic() + _RETRY_SECONDS
            if closed:
                self._let_go()
                return

    def _write(self, waiting: list[Sequence[Change]]) -> None:
        if self._anew or self._bytes > self._limit_bytes:
            if time.monotonic() >= self._retry_at:
                self._write_anew()
            return
        if not waiting:
            return
        assert self._slot is not None
        if self._fd < 0:
            self._fd = slots.regular(self._slot.path, os.O_WRONLY | os.O_APPEND)
            os.ftruncate(self._fd, self._bytes)
        self._bytes += _write_all(self._fd, b"".join(map(record, waiting)))

    def _write_anew(self) -> None:
        assert self._slot is not None
        self._let_go()
        with self._changed:
            changes = list(snapshot(self._tree.nodes()))
            self._waiting, self._waiting_bytes, self._anew = [], 0, False
        draft = self._slot.path.with_suffix(".draft")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)  # whatever it is
        fd = slots.regular(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        try:
            self._bytes = _write_all(fd, MAGIC)
            rest = iter(changes)
            while batch := list(islice(rest, _BATCH)):
                self._bytes += _write_all(fd, record(batch, before=_SNAPSHOT))
            os.replace(draft, self._slot.path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
        self._fd, self._limit_bytes = fd, _limit(self._bytes)

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _limit(live_bytes: int) -> int:
    return 2 * live_bytes + _SMALL_BYTES


def _write_all(fd: int, data: bytes) -> int:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
    return len(data)
