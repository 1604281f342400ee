"""Processes that need not import torch anew, which takes two seconds of a processor: they are forked."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, NoReturn

LONGEST_SECONDS = 240
"""A child that takes longer is ended by a signal."""
LAUNCHER = f"""
import json, os, signal, sys
import torch, kvloom.engine.engine
kvloom.Registry.discover()  # imports what a child would
folder, jobs = json.load(sys.stdin)
children = {{}}
for number, job in enumerate(jobs):
    child = os.fork()
    if child == 0:
        break
    children[child] = number
else:
    ends = dict(os.wait() for _ in jobs)
    print(json.dumps([os.waitstatus_to_exitcode(ends[child]) for child in children]))
    sys.exit()
signal.alarm({LONGEST_SECONDS})
for descriptor, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{{folder}}/{{number}}.{{name}}", os.O_CREAT | os.O_WRONLY), descriptor)
sys.argv[1:] = job[1:]
exec(compile(job[0], "<program>", "exec"))
"""


class Ended(NamedTuple):
    """The end of a child."""

    status: int
    """The result of `os.waitstatus_to_exitcode`."""
    out: str
    err: str


def ended(*programs: tuple[object, ...]) -> list[Ended]:
    """Run Python programs (source, arguments...) at the same time, each to the end of an interpreter."""
    with TemporaryDirectory() as folder:
        jobs = json.dumps([folder, [[str(part) for part in program] for program in programs]])
        done = subprocess.run(
            [sys.executable, "-c", LAUNCHER], input=jobs, capture_output=True, text=True, timeout=LONGEST_SECONDS + 60
        )
        assert done.returncode == 0, done.stderr
        return [_ended(Path(folder, str(at)), status) for at, status in enumerate(json.loads(done.stdout))]


def forked(work: Callable[[], object]) -> Ended:
    """Run `work` in a fork of this process, which ends without the end of an interpreter."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "child")
        child = os.fork()
        if child == 0:
            _work(work, path)
        _, status = os.waitpid(child, 0)
        return _ended(path, os.waitstatus_to_exitcode(status))


def _work(work: Callable[[], object], path: Path) -> NoReturn:
    status = 1
    signal.alarm(LONGEST_SECONDS)
    with open(f"{path}.out", "w") as sys.stdout, open(f"{path}.err", "w") as sys.stderr:
        logging.root.handlers.clear()  # pytest's
        try:
            work()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
    os._exit(status)


def _ended(path: Path, status: int) -> Ended:
    return Ended(status, *(path.with_suffix(suffix).read_text() for suffix in (".out", ".err")))
