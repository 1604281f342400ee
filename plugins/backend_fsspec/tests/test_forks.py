"""Processes that were forked after obstore had been used, whose threads they do not have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal, sys
from kvloom_backend_fsspec.backend import FsspecBackend

def opened():
    return FsspecBackend(FsspecBackend.Config(url=sys.argv[1]))

def forked(act):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(20)
    code = 1
    try:
        act()
        code = 0
    finally:
        os._exit(code)

backend = opened()
backend.put("a", [b"parent's"])
backend.contains_many(["a", "b", "c"])

def new_one(depth=0):
    mine = opened()
    assert mine.get("a") == b"parent's" and mine.contains_many(["a", "b"]) == [True, False]
    mine.put(f"child-{depth}", [b"child's"])
    assert {entry.key for entry in mine.scan()} >= {"a", f"child-{depth}"}
    assert mine.create(f"new-{depth}", [b"1"]) and not mine.create(f"new-{depth}", [b"2"])
    mine.close()
    if depth < 2:
        assert forked(lambda: new_one(depth + 1)) == 0

def inherited():
    assert backend.contains_many(["a", "b"]) == [True, False]
    backend.close()

assert forked(new_one) == 0, "a new instance in a child, and in its children"
assert forked(inherited) == 0, "the inherited instance"
assert backend.contains_many(["a", "child-0", "child-2", "b"]) == [True, True, True, False]
backend.close()
print("fine")
"""


def test_a_forked_child_opens_its_own_and_so_do_its_children(tmp_path: Path) -> None:
    said = subprocess.run([sys.executable, "-c", PROGRAM, f"file://{tmp_path}/kv"], capture_output=True, text=True)
    assert said.stdout.strip() == "fine", said.stderr
