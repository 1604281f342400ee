"""Processes that are killed."""

from __future__ import annotations

import os
import time

import pytest

from kvloom_testkit.backends.base import BackendRequirements, Open
from kvloom_testkit.backends.programs import run
from kvloom_testkit.keys import Namespace
from kvloom_testkit.requirements import needs

LEASE_SECONDS = 10.0
"""How long a right may outlive the process that had it, as the contract says."""

CHILDREN = """
import select, traceback

PATIENCE_SECONDS = 30


def forked(function):
    # Forked before this process has opened anything: what the child opens is its own.
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def ended(child):
    # How it ended, as subprocess says it; None if it had to be killed because it hung.
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.002)


def heard(pipe):
    # Whether the other end said something; not if it ended or hangs.
    return bool(select.select([pipe], [], [], PATIENCE_SECONDS)[0] and os.read(pipe, 1))

"""
"""Begins the programs below."""

PUT = """
BYTES, PARTS, MOMENTS = 3 << 20, 64, (0, 0.0005, 0.002, 0.005, 0.02)


def version(number):
    return bytes([number]) * (BYTES + 40_009 * number)


def is_whole(blob):
    return blob is None or (len(blob) > 0 and blob == version(blob[0]))


def put(told):
    backend = opened()
    blobs = []
    for number in range(1, 5):
        blob = memoryview(version(number))
        step = len(blob) // PARTS + 1
        blobs.append([blob[start : start + step] for start in range(0, len(blob), step)])
    while True:
        for blob in blobs:
            os.write(told, b".")
            backend.put(keys[0], blob)


def got(backend, key):
    blob = backend.get(key)
    return None if blob is None else bytes(memoryview(blob))


def look():
    backend = opened()
    blob = got(backend, keys[0])
    assert is_whole(blob), f"a part of a blob: {len(blob)} bytes"
    assert bool(backend.contains(keys[0])) == (blob is not None), "`contains` does not agree with `get`"
    listed = [entry.key for entry in backend.scan(keys[0])]
    assert blob is not None or keys[0] not in listed, "listed, and not there"
    backend.put(keys[0], [version(9)])
    assert got(backend, keys[0]) == version(9), "what is put after it"
    backend.close()


for moment in MOMENTS:
    hears, told = os.pipe()
    child = forked(lambda: put(told))
    os.close(told)
    begun = [heard(hears) for _ in range(3)]
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    if ended(child) != -signal.SIGKILL or not all(begun):
        sys.exit("a process that puts ended by itself, or hung")
    os.close(hears)
    status = ended(forked(look))
    if status != 0:
        sys.exit("a process that looks at what a killed one left " + ("hung" if status is None else "failed"))
"""

HOLD = """
def ask(right, told):
    backend = opened()
    has = backend.hold(right)
    if has and backend.shared:
        ended(forked(backend.close))
        if opened().hold(right):
            sys.exit("a forked child has given back the right of its parent")
    os.write(told, b"y" if has else b"n")
    time.sleep(PATIENCE_SECONDS)


for right in keys:
    hears, told = os.pipe()
    child = forked(lambda: ask(right, told))
    os.close(told)
    answer = os.read(hears, 1).decode() if select.select([hears], [], [], PATIENCE_SECONDS)[0] else "hung"
    os.kill(child, signal.SIGKILL)
    ended(child)
    os.close(hears)
    print(answer or "failed")
"""


class DeathRequirements(BackendRequirements):
    """Processes that end without `close`."""

    @needs("persistent")
    def test_B36_a_put_that_is_killed_leaves_no_part(self, names: Namespace, opened: Open) -> None:
        """After the process was killed in `put`, a new one opens the store and finds a version whole, or nothing.

        `contains` agrees, `scan` lists no blob that is not there, and the key can be put again.

        Why: processes are killed, for want of memory above all, and the store outlives them.

        Usually: the blob is written to its final place, shielded from readers by a lock which ends with the process; an
        index is written first; or what only `close` or an `except` removes (a lock file, a draft of a fixed name) is in
        the way for good.
        """
        if not hasattr(os, "fork"):
            pytest.skip("this system has no fork")
        backend = opened()
        opened.close(backend)
        run(CHILDREN + PUT, backend, [names.key()])

    @needs("hold")
    def test_B37_one_process_has_a_right_until_it_ends(self, names: Namespace, opened: Open) -> None:
        """`hold` tells another process False while this one has the right; that of a killed process can be had again.

        A forked child that closes the instance does not give back what its parent has. Where leases tell that a process
        has ended, its right can be had within ten seconds.

        Why: two processes that evict delete each other's blobs; with none the store fills up, until somebody notices.

        Usually: a table in memory, which other processes do not see; a file that is there while the right is held,
        which nobody removes for the dead; or a lock that a child inherits and unlocks, or that is
        gone when another instance closes the same file (POSIX).
        """
        if not hasattr(os, "fork"):
            pytest.skip("this system has no fork")
        mine, theirs = (f"kit-{names.fingerprint[:8]}-{number}" for number in (1, 2))
        backend = opened()
        if type(backend).shared:
            assert backend.hold(mine) is True
            other = opened()
            assert other.hold(mine) is False
            opened.close(other)  # which closes a file that is locked, where it is one
        else:
            opened.close(backend)
        told = run(CHILDREN + HOLD, backend, [mine, theirs]).split()
        assert told == ["n" if type(backend).shared else "y", "y"], "what other processes were told"
        if not type(backend).shared:
            backend = opened()
        until = time.monotonic() + LEASE_SECONDS
        while not backend.hold(theirs):
            assert time.monotonic() < until, "its holder was killed, and nobody can have the right"
            time.sleep(0.02)
