"""Processes that are killed."""

from __future__ import annotations

import os
import time

import pytest

from kvloom_testkit import effort
from kvloom_testkit.backends.base import BackendRequirements, Open
from kvloom_testkit.backends.programs import run
from kvloom_testkit.keys import Namespace
from kvloom_testkit.requirements import needs

STEPS = 40
"""Number of calls of one `put` at which a process is killed, if there is time."""
LEASE_SECONDS = 10.0
"""Maximum time that a right may outlive the process that had it, by the contract."""

CHILDREN = """
import contextlib, select, traceback

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


def import_what_opening_imports():
    # One child says what it is, and all others find it imported.
    hears, told = os.pipe()
    known = set(sys.modules)
    child = forked(lambda: (opened().close(), os.write(told, " ".join(set(sys.modules) - known).encode())))
    os.close(told)
    ended(child)
    with open(hears) as names:
        for name in names.read().split():
            with contextlib.suppress(Exception):
                importlib.import_module(name)

"""
"""Begins the programs below."""

LOOK = """
BYTES = 3 << 20


def version(number):
    return bytes([number]) * (BYTES + 40_009 * number)


def is_whole(blob):
    return blob is None or (len(blob) > 0 and blob == version(blob[0]))


def got(backend, key):
    blob = backend.get(key)
    return None if blob is None else bytes(memoryview(blob))


def look(key):
    backend = opened()
    blob = got(backend, key)
    assert is_whole(blob), f"a part of a blob: {len(blob)} bytes"
    assert bool(backend.contains(key)) == (blob is not None), "`contains` does not agree with `get`"
    listed = [entry.key for entry in backend.scan(key)]
    assert blob is not None or key not in listed, "listed, and not there"
    backend.put(key, [version(9)])
    assert got(backend, key) == version(9), "what is put after it"
    backend.close()


def check_what_is_left(key):
    status = ended(forked(lambda: look(key)))
    if status != 0:
        sys.exit("a process that looks at what a killed one left " + ("hung" if status is None else "failed"))

"""

PUT = """
PARTS, MOMENTS = 64, (0, 0.0005, 0.002, 0.005, 0.02)


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
    check_what_is_left(keys[0])
"""
"""A program killed at random moments."""

PUT_STEP_BY_STEP = """
import gc

BYTES = 20_000
FEWEST, SECONDS = 10, 4
most = int(arguments[0])
import_what_opening_imports()
gc.disable()  # what is collected, and when, is no step


def put(key, number, last, told=None):
    # To be killed at the last step; without one, says how many there are.
    backend, step, this_process = opened(), 0, os.getpid()
    if number == 2:
        backend.put(key, [version(1)])

    def count(frame, event, arg):
        nonlocal step
        step += 1
        if step == last:
            os.kill(this_process, signal.SIGKILL)

    blob = version(number)
    sys.setprofile(count)
    backend.put(key, [blob[:5000], blob[5000:]])
    sys.setprofile(None)
    if told is not None:
        os.write(told, b"%d" % step)
    elif step < last:
        os.kill(this_process, signal.SIGKILL)  # it took fewer this time


started = time.monotonic()
for number, some in ((1, keys[: most + 1]), (2, keys[most + 1 :])):
    hears, told = os.pipe()
    if ended(forked(lambda: put(some[most], number, 0, told))) != 0:
        sys.exit("a process that puts a blob failed, or hung")
    steps = int(os.read(hears, 20))
    wanted = sorted({1 + steps * place // most for place in range(most)})
    for tried, (key, last) in enumerate(zip(some, wanted)):
        if tried >= FEWEST and time.monotonic() - started > number * SECONDS and most < 200:
            break
        # The steps in an order that leaves no long gaps when time is up.
        last = wanted[tried * 7919 % len(wanted)]
        if ended(forked(lambda: put(key, number, last))) != -signal.SIGKILL:
            sys.exit("a process that puts ended by itself, or hung")
        check_what_is_left(key)
"""
"""A program killed between two calls, before and after its system calls: as many as there is time for."""

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
        """After a process was killed in `put`, a new one opens the store and finds a whole version, or nothing.

        It is killed at random moments of a long `put`, and between any two calls of a short one. `contains` agrees,
        `scan` lists no missing blob, and the key can be put again.

        Why: processes are killed, mostly for lack of memory, and the store outlives them.

        Usually: the blob is written to its final place, shielded from readers by a lock which ends with the process; an
        index is written first; or a lock file or a draft with a fixed name, which only `close` or an `except` removes,
        blocks the key for ever.
        """
        if not hasattr(os, "fork"):
            pytest.skip("this system has no fork")
        backend = opened()
        opened.close(backend)
        run(CHILDREN + LOOK + PUT, backend, [names.key()])
        most = effort.rounds(STEPS)
        keys = [names.named(f"-/{number}") for number in range(2 * (most + 1))]
        run(CHILDREN + LOOK + PUT_STEP_BY_STEP, backend, keys, arguments=[str(most)])

    @needs("hold")
    def test_B37_one_process_has_a_right_until_it_ends(self, names: Namespace, opened: Open) -> None:
        """`hold` returns False in another process while this one has the right; a killed process's right becomes free.

        A forked child that closes the instance does not release its parent's right. With leases, the right of a dead
        process is free within ten seconds.

        Why: two processes that evict delete each other's blobs; without any, the store fills up unnoticed.

        Usually: a table in memory, which other processes do not see; a file that exists while the right is held, and
        stays after the process has died; or a lock that a child inherits and unlocks, or that ends when another
        instance closes the same file (POSIX).
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
