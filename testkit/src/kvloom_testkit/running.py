"""Work on threads and in fresh processes, for requirements about both. Nothing that is started here is left behind."""

from __future__ import annotations

import atexit
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cache
from pathlib import Path

SECONDS = 30.0
_PROCESS_SECONDS = 120.0
"""Timeout of a fresh interpreter, which may have to import torch on a busy machine."""
_SWITCH_SECONDS = 1e-5
"""Interval at which threads take turns: short, so that races show sooner."""
_PAUSE_OF = 20
"""Number of calls and returns after which a restless thread pauses once."""


def leave_ci(environment: MutableMapping[str, str]) -> None:
    """Take away the variables by which pytest knows CI: there it makes a diff of all that a failed assertion compares.

    A diff of blobs took up to 91 seconds.
    """
    for name in ("CI", "BUILD_NUMBER"):
        environment.pop(name, None)


_profile_lock = threading.Lock()


def _set_profile(function: Callable[..., object] | None) -> None:
    """`sys.setprofile`, which Python 3.11 refuses while another thread is inside: audit hooks make it slow."""
    with _profile_lock:
        sys.setprofile(function)


def together(*functions: Callable[[], object], seconds: float = SECONDS, restless: bool = False) -> None:
    """Run each function on a thread of its own, all beginning at once; raises the first error of any of them.

    restless: between calls, those of the component's own code too, they pause now and then. What must not be
    interrupted and has no lock is then interrupted, however quick it is.
    """
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(number: int, function: Callable[[], object]) -> None:
        try:
            start.wait(seconds)
            if restless:
                _set_profile(pauses(number))
            function()
        except BaseException as error:
            errors.append(error)
        finally:
            _set_profile(None)

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(functions)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds)
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise next((one for one in errors if not isinstance(one, threading.BrokenBarrierError)), errors[0])
    assert not any(thread.is_alive() for thread in threads), f"a thread was still busy after {seconds:.0f} s"


def in_rounds(count: int, *functions: Callable[[int], object], restless: bool = True) -> None:
    """`together` in rounds, all functions starting at once each time; they receive the number of the round."""
    begin = threading.Barrier(len(functions))

    def run(function: Callable[[int], object]) -> None:
        try:
            for number in range(count):
                begin.wait(SECONDS)
                function(number)
        except BaseException:
            begin.abort()  # else the others would wait for it
            raise

    try:
        together(*(lambda one=one: run(one) for one in functions), restless=restless)  # type: ignore[misc]
    except threading.BrokenBarrierError as error:
        raise AssertionError("a thread failed, or did not end in time") from error


def comes_true(told: Callable[[], bool], seconds: float) -> bool:
    """Return whether it comes true in time. Asks often at first and ever less often, because asking
    may be expensive."""
    until, pause = time.monotonic() + seconds, 0.01
    while not told():
        left = until - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause *= 1.5
    return True


def pauses(seed: int) -> Callable[..., None]:
    """For `sys.setprofile`: now and then a thread pauses between calls."""
    chance, pause = random.Random(seed).random, time.sleep

    def now_and_then(frame: object, event: str, arg: object) -> None:
        if chance() * _PAUSE_OF < 1:
            pause(1e-6)

    return now_and_then


_FORKS = """
import json, os, sys
import torch, kvloom_testkit.chunks

for line in sys.stdin:
    folder, place, variables, code, arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY, 0o600), descriptor)
        os.chdir(place)
        os.environ.update(variables)
        sys.path[:], sys.argv[1:] = variables["PYTHONPATH"].split(os.pathsep), arguments
        exec(compile(code, "<program>", "exec"))
        sys.stdout.flush()
        os._exit(0)  # the end of an interpreter with torch takes half a second
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A program that forks for each line of its input: importing torch takes a processor seconds."""


@cache
def _forks(environment: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    variables = {**os.environ, **dict(environment), "PYTHONHASHSEED": "random"}
    command = [sys.executable, "-P", "-c", _FORKS]
    forks = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(forks.communicate)  # it ends with its input
    return forks


def with_torch(code: str, *arguments: str, environment: Mapping[str, str]) -> str:
    """Run Python code in a process that has imported torch and this kit's chunks; return its output.

    It is a fork of an interpreter with another hash seed, which waits for the next one. The rest is as in
    `in_fresh_process`.
    """
    if not hasattr(os, "fork"):
        return in_fresh_process(code, *arguments, environment=environment)
    forks = _forks(tuple(environment.items()))
    assert forks.stdin is not None and forks.stdout is not None
    variables = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryDirectory() as folder:
        forks.stdin.write(json.dumps([folder, os.getcwd(), variables, code, arguments]) + "\n")
        forks.stdin.flush()
        ready, _, _ = select.select([forks.stdout], [], [], _PROCESS_SECONDS)
        status = forks.stdout.readline().strip() if ready else "still running"
        if not status or not ready:  # the next one needs another
            forks.kill()
            _forks.cache_clear()
        said, wrong = (Path(folder, name).read_text() if Path(folder, name).exists() else "" for name in ("out", "err"))
    assert status == "0", f"the process failed ({status}):\n{wrong.strip()[-2000:]}"
    return said


def in_fresh_process(
    code: str, *arguments: str, hash_seed: str = "random", path: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """Run Python code in a new interpreter; return its output. Its `sys.argv[1:]` are `arguments`.

    hash_seed: its PYTHONHASHSEED. path: first places of its module search; default: this process's. environment:
    variables that differ.
    """
    paths = os.pathsep.join([*(path or sys.path)])
    variables = {**os.environ, **(environment or {}), "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
    command = [sys.executable, "-P", "-c", code, *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=_PROCESS_SECONDS, check=False)
    assert done.returncode == 0, f"the process failed:\n{done.stderr.strip()[-2000:]}"
    return done.stdout
