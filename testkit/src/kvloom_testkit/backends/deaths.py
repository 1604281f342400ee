"""Processes that are killed."""

from __future__ import annotations

import os
import time

import pytest

from kvloom import StorageBackend
from kvloom_testkit import effort
from kvloom_testkit.backends.base import BackendRequirements, Open
from kvloom_testkit.backends.programs import run
from kvloom_testkit.keys import Namespace
from kvloom_testkit.remaking import directories_of
from kvloom_testkit.requirements import claims, needs

STEPS = 40
"""Number of calls of one `put` at which a process is killed, if there is time."""
LEASE_SECONDS = 10.0
"""Maximum time that a right may outlive the process that had it, by the contract."""

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

REFUSED = """
import resource

LIMIT = 64 << 10
blob = bytes(range(256)) * 4096
backend = opened()
for form, key in zip(arguments, keys):
    verbs = {
        "put": lambda: backend.put(key, [blob]),
        "put_many": lambda: backend.put_many([(key, [blob])]),
        "put_over": lambda: backend.put_over(key, [blob], []),
        "create": lambda: backend.create(key, [blob]),
    }
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        verbs[form]()
        raised = False
    except Exception:
        raised = True
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    got = backend.get(key)
    assert raised or got is not None, f"`{form}` raised nothing, and nothing is there"
    assert got is None or bytes(got) == blob, f"after `{form}` a part of the blob is there"
    backend.put(key, [blob])
    assert bytes(backend.get(key)) == blob, "put again when there was no limit"
backend.close()
"""

UNREADABLE = """
import resource


class Room:
    def reserve(self, num_bytes):
        self.memory = bytearray(num_bytes)
        return memoryview(self.memory)

    def filled(self, num_bytes):
        pass


def got_into(key):
    room = Room()
    return room.memory if backend.get_into(key, room) else None


def got_range(key):
    memory = bytearray(len(blob))
    return memory if backend.get_range(key, 0, memoryview(memory)) else None


key, blob = keys[0], bytes(range(256)) * 40
backend = opened()
backend.put(key, [blob])
verbs = {"get": lambda: backend.get(key), "get_into": lambda: got_into(key), "get_range": lambda: got_range(key)}
for form, verb in verbs.items():
    verb()  # what the first call opens and imports is there
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        got = verb()
        raised = False
    except Exception:
        got, raised = None, True
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert raised or got is not None, f"`{form}` says that a blob is not there which it could not open"
    assert got is None or bytes(got) == blob, f"`{form}` gives another blob"
    assert bytes(verb()) == blob, f"`{form}` when there was no limit"
backend.close()
"""

UNDELETABLE = """
import errno

EVENTS = {"os.remove", "os.rename", "os.rmdir", "os.truncate", "os.link", "shutil.rmtree"}
refuses = False


def refuse(event, arguments):
    if refuses and event in EVENTS:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


sys.addaudithook(refuse)
backend = opened()
for form, key in zip(("delete", "delete_many"), keys):
    delete = backend.delete if form == "delete" else lambda key: backend.delete_many([key])
    backend.put(key, [b"blob"])
    refuses = True
    try:
        delete(key)
        raised = False
    except Exception:
        raised = True
    finally:
        refuses = False
    assert raised or backend.get(key) is None, f"`{form}` raised nothing, and the blob is there"
    delete(key)
    assert backend.get(key) is None, f"`{form}` when nothing was in its way"
backend.close()
"""

LEFT = """
import contextlib, resource
from kvloom_testkit.backends.broken import FAILURES, BreaksHalfWay

key, blob = keys[0], bytes(range(256)) * 2000
folders = [one for one in arguments if one != "create"]
backend = opened()
forms = [backend.put, lambda key, blob: backend.put_many([(key, blob)])] + [backend.create] * ("create" in arguments)


def fail():
    for put in forms:
        for failure in FAILURES:
            with contextlib.suppress(failure):
                put(key, BreaksHalfWay(blob, failure))
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(blob) // 8, before[1]))
        try:
            with contextlib.suppress(Exception):
                put(key, [blob])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    backend.delete(key)
    return sum(len(files) for folder in folders for _, _, files in os.walk(folder))


backend.put(key, [blob])
before, after = fail(), fail()
assert before == after, f"{after - before} files more"
backend.close()
"""


class DeathRequirements(BackendRequirements):
    """Processes that end without `close`, and systems that refuse."""

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

    def test_B45_a_write_that_fails_is_said(self, names: Namespace, opened: Open) -> None:
        """If the system refuses a write, `put` and its other forms raise, or the blob is stored all the same.

        The test limits the size of this process's files; servers' files are not limited. Once the limit is lifted,
        everything works.

        Why: a blob that was reported as stored but was not takes up capacity in the count, and every read of it fails.

        Usually: an OSError is ignored because "only a cache" has failed, or it is raised on a thread that is not
        checked.
        """
        if not hasattr(os, "fork"):
            pytest.skip("this system has no fork")
        backend = opened()
        opened.close(backend)
        forms = ["put", "put_many", "put_over"] + ["create"] * claims(backend, "create", StorageBackend)
        run(CHILDREN + REFUSED, backend, names.keys(len(forms)), arguments=forms)

    def test_B47_a_read_that_fails_is_no_miss(self, names: Namespace, opened: Open) -> None:
        """`get` and its other forms raise, or give the blob all the same, if the system refuses to open a file.

        It is tried without any descriptor left to this process.

        Why: what is said to be not there is forgotten, and computed and written again, for as long as the trouble
        lasts, and nobody hears of it; a tier that raises is paused and its error counted.

        Usually: `except OSError: return None`, where FileNotFoundError is meant.
        """
        backend = opened()
        opened.close(backend)
        run(UNREADABLE, backend, [names.key()])

    def test_B48_a_delete_that_fails_is_said(self, names: Namespace, opened: Open) -> None:
        """`delete` and `delete_many` raise, or the blob is gone, if the system refuses to remove a file.

        It is tried with errors of the calls of Python's `os`: what native code or a server removes has none.

        Why: what is said to be gone is not counted any more, so that the store grows past its bound.

        Usually: `except OSError: pass`, where FileNotFoundError is meant.
        """
        backend = opened()
        opened.close(backend)
        run(UNDELETABLE, backend, names.keys(2))

    def test_B49_a_put_that_fails_leaves_no_file_behind(self, names: Namespace, opened: Open) -> None:
        """After puts whose blobs could not be read, or for which there was no room, there are as many files as before.

        It is tried where a setting names a directory.

        Why: the disk is full, each write fails, and each leaves something that no listing shows and nobody removes.

        Usually: the draft is removed when all went well, and not where an exception passes.
        """
        backend = opened()
        folders = [str(folder) for folder in directories_of(backend)]
        if not folders:
            pytest.skip("no setting names a directory")
        creates = claims(backend, "create", StorageBackend)
        opened.close(backend)
        run(LEFT, backend, [names.key()], arguments=["create"] * creates + folders)

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
