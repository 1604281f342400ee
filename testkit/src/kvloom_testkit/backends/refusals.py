"""Calls that the operating system refuses."""

from __future__ import annotations

import pytest

from kvloom import StorageBackend
from kvloom_testkit.backends.base import BackendRequirements, Open
from kvloom_testkit.backends.programs import run
from kvloom_testkit.keys import Namespace
from kvloom_testkit.remaking import directories_of
from kvloom_testkit.requirements import claims

REFUSED = """
import resource
from kvloom_testkit.backends.doubles import put_all

LIMIT = 64 << 10
blob = bytes(range(256)) * 4096
backend = opened()
for form, key in zip(arguments, keys):
    verbs = {
        "put": lambda: backend.put(key, [blob]),
        "put_many": lambda: put_all(backend, [(key, [blob])]),
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
from kvloom_testkit.backends.doubles import FAILURES, BreaksHalfWay
from kvloom_testkit.backends.doubles import put_all

key, blob = keys[0], bytes(range(256)) * 2000
folders = [one for one in arguments if one != "create"]
backend = opened()
forms = [backend.put, lambda key, blob: put_all(backend, [(key, blob)])] + [backend.create] * ("create" in arguments)


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


class RefusalRequirements(BackendRequirements):
    """A failed open, write or remove is an error, and leaves nothing behind."""

    def test_B45_a_write_that_fails_is_said(self, names: Namespace, opened: Open) -> None:
        """If the system refuses a write, `put` and its other forms raise, or the blob is stored all the same.

        The test limits the size of this process's files; servers' files are not limited. Once the limit is lifted,
        everything works.

        Why: a blob that was reported as stored but was not takes up capacity in the count, and every read of it fails.

        Usually: an OSError is ignored because "only a cache" has failed, or it is raised on a thread that is not
        checked.
        """
        backend = opened()
        opened.close(backend)
        forms = ["put", "put_many", "put_over"] + ["create"] * claims(backend, "create", StorageBackend)
        run(REFUSED, backend, names.keys(len(forms)), arguments=forms)

    def test_B47_a_read_that_fails_is_no_miss(self, names: Namespace, opened: Open) -> None:
        """`get` and its other forms raise, or give the blob all the same, if the system refuses to open a file.

        It is tried without any descriptor left to this process.

        Why: a chunk that is reported missing is computed and written again, for as long as the trouble lasts, without
        any error. A tier that raises is paused, and its error counted.

        Usually: `except OSError: return None`, where FileNotFoundError is meant.
        """
        backend = opened()
        opened.close(backend)
        run(UNREADABLE, backend, [names.key()])

    def test_B48_a_delete_that_fails_is_said(self, names: Namespace, opened: Open) -> None:
        """`delete` and `delete_many` raise, or the blob is gone, if the system refuses to remove a file.

        It is tried with errors of the calls of Python's `os`: what native code or a server removes has none.

        Why: a blob that is reported deleted is not counted any more, so that the store grows past its bound.

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
