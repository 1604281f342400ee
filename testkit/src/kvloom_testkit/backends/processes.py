"""Other processes: fresh ones, and forks of one that has used the store."""

from __future__ import annotations

import json
import os
from importlib import metadata

import pytest

from kvloom import StorageBackend
from kvloom_testkit.backends.base import BackendRequirements, Open, content
from kvloom_testkit.backends.deaths import CHILDREN
from kvloom_testkit.backends.programs import run
from kvloom_testkit.keys import Namespace, blob_of
from kvloom_testkit.requirements import claims, needs

READ = """
backend = opened()
print(json.dumps([bytes(blob).hex() if (blob := backend.get(key)) is not None else None for key in keys]))
backend.close()
"""

LIGHT = """
backend = opened()
backend.put(keys[0], [b"blob"])
assert bytes(backend.get(keys[0])) == b"blob"
backend.delete(keys[0])
backend.close()
print("torch" in sys.modules)
"""

FORK = """
from kvloom_testkit.running import pauses

ROUNDS = 100
blobs = {key: bytes([number]) * (5000 + number) for number, key in enumerate(keys[2:])}


def read_all(seed):
    # The parent and the child at the same time, with a pause now and then between any two calls.
    sys.setprofile(pauses(seed))
    try:
        for _ in range(ROUNDS):
            for key, blob in blobs.items():
                assert bytes(backend.get(key)) == blob, "beside the other process"
    finally:
        sys.setprofile(None)


backend = opened()
for key, blob in blobs.items():
    backend.put(key, [blob])
backend.put(keys[0], [b"parent's"])
assert bytes(backend.get(keys[0])) == b"parent's" and backend.contains(keys[0])
time.sleep(0.1)  # until threads of the store's own rest: where none does, the child begins one, and works by luck
child = os.fork()
if not child:
    code = 3
    try:
        got = bytes(backend.get(keys[0]))
        backend.put(keys[1], [b"child's"])
        read_all(1)
        code = 0 if got == b"parent's" and bytes(backend.get(keys[1])) == b"child's" else 2
        backend.close()
    except BaseException as error:
        print(f"in the child: {error!r}", file=sys.stderr, flush=True)
    os._exit(code)
failed = None
try:
    read_all(2)
except BaseException as error:
    failed = error
deadline = time.monotonic() + 10
while True:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        break
    if time.monotonic() > deadline:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        sys.exit("the child was still busy after 10 s")
    time.sleep(0.005)
if os.waitstatus_to_exitcode(status) != 0:
    sys.exit(f"the child ended with {os.waitstatus_to_exitcode(status)}")
if failed is not None:
    raise failed
assert bytes(backend.get(keys[0])) == b"parent's", "in the parent, after the fork"
assert bytes(backend.get(keys[1])) == b"child's", "in the parent, what the child put"
backend.put(keys[0], [b"again"])
assert bytes(backend.get(keys[0])) == b"again"
backend.close()
"""

EACH_OTHER = """
def sees(backend, key, blob):
    got = backend.get(key)
    got = None if got is None else bytes(got)
    assert got == blob, f"{got!r} is read where another process has put {blob!r}"
    assert bool(backend.contains(key)) == (blob is not None), f"`contains` says otherwise, where there is {blob!r}"
    assert backend.get_range(key, 0, memoryview(bytearray(1))) == (blob is not None), "`get_range` says otherwise"
    listed = [entry.key for entry in backend.scan(key)]
    assert not lists or (key in listed) == (blob is not None), f"a listing, where there is {blob!r}"


def other_process():
    os.close(asks)
    os.close(hears)
    backend = opened()
    for step in (
        lambda: backend.put(keys[0], [b"blob 1"]),
        lambda: backend.put(keys[0], [b"blob 2"]),
        lambda: backend.delete(keys[0]),
        lambda: sees(backend, keys[1], None),
        lambda: sees(backend, keys[1], b"of the parent"),
        lambda: sees(backend, keys[1], None),
    ):
        if not os.read(asked, 1):
            sys.exit("the one that asks has ended")
        step()
        os.write(told, b".")
    backend.close()


lists = bool(arguments)
(asked, asks), (hears, told) = os.pipe(), os.pipe()
child = forked(other_process)
os.close(asked)
os.close(told)


def let_it_go_on():
    os.write(asks, b".")
    if not heard(hears):
        sys.exit("the other process failed, or hung")


backend = opened()
sees(backend, keys[0], None)
for blob in (b"blob 1", b"blob 2", None):
    let_it_go_on()
    sees(backend, keys[0], blob)
let_it_go_on()
backend.put(keys[1], [b"of the parent"])
let_it_go_on()
backend.delete(keys[1])
let_it_go_on()
if ended(child) != 0:
    sys.exit("the other process failed, or hung")
backend.close()
"""


class ProcessRequirements(BackendRequirements):
    """Processes."""

    @needs("shared")
    def test_B23_an_instance_survives_a_fork(self, names: Namespace, opened: Open) -> None:
        """A child process can use the instance that it inherits, and close it, and the parent goes on with it.

        Both may read at the same time.

        Why: servers fork workers, and not always before the first request.

        Usually: a thread or connection is made in `__init__`; the child inherits a queue that nobody reads, talks over
        its parent's socket, or says goodbye on it; or an open file, whose place to read from the two have in common.
        """
        if not hasattr(os, "fork"):
            pytest.skip("this system has no fork")
        backend, (one, other, *more) = opened(), names.keys(5)
        run(FORK, backend, [one, other, *more])
        assert [content(backend.get(key)) for key in (one, other)] == [b"again", b"child's"]

    @needs("shared")
    def test_B46_two_processes_see_each_other_at_once(self, names: Namespace, opened: Open) -> None:
        """A put or delete by one process is visible to the next call of another that has the store open, listings
        included.

        Why: `shared` is claimed; ranks and replicas find each other's KV that way.

        Usually: a cache of blobs or missing keys that all instances of a process share, so that two instances in one
        process agree.
        """
        if not hasattr(os, "fork"):
            pytest.skip("this system has no fork")
        backend = opened()
        lists = ["lists"] * claims(backend, "scan", StorageBackend)
        run(CHILDREN + EACH_OTHER, backend, names.keys(2), arguments=lists)

    @needs("persistent")
    def test_B24_another_process_reads_the_same(self, names: Namespace, opened: Open) -> None:
        """A new process, whose `hash` of a text differs (PYTHONHASHSEED), finds what this one put.

        Why: this is a restart.

        Usually: `hash(key)` names the file, or a place depends on the order of a set.
        """
        backend, keys = opened(), names.keys(6)
        blobs = [blob_of(100 + number) for number in range(len(keys))]
        for key, blob in zip(keys, blobs, strict=True):
            backend.put(key, [blob])
        if not type(backend).shared:
            opened.close(backend)
        seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        found = json.loads(run(READ, backend, keys, hash_seed=seed))
        assert found == [blob.hex() for blob in blobs]

    def test_B26_no_torch_is_imported(self, names: Namespace, opened: Open) -> None:
        """Neither importing the backend's package, nor its plugin module, nor using an instance imports torch.

        Why: commands list and inspect stores, also on machines without torch, and must start fast.

        Usually: a type is imported for an annotation, or one module of the package imports all the others.
        """
        backend = opened()
        package = type(backend).__module__.partition(".")[0]
        opened.close(backend)
        entries = [entry.module for entry in metadata.entry_points(group="kvloom.v1")]
        mine = [entry for entry in entries if entry.partition(".")[0] == package and package != "kvloom"]
        said = run(LIGHT, backend, [names.key()], entries=mine)
        assert said.split() == ["False"], "torch was imported"
