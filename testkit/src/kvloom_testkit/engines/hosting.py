"""A process that has imported an engine and forks one for each that is asked for, from inside.

Importing an engine takes longer than most engines live. The process takes orders, JSON lines, from the kit's socket; a
forked process makes a connection of its own, on which a driver answers. Each line there is
`{"call": NAME, "args": {...}}`, with the name of a method of the driver. The answer is `{"ok": ...}` or
`{"error": "TYPE: TEXT", "where": TRACEBACK}`.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import json
import operator
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import resource_tracker
from typing import Any, NoReturn, TextIO

_PR_SET_PDEATHSIG = 1
_MOST_CHARACTERS = 4000
"""Of an error, and of its traceback."""


def run(
    path: str, load: Callable[[], dict[str, Any]], driver: Callable[[], object],
    orders: Mapping[str, Callable[..., Any]] | None = None, sweep: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Answer orders until the kit closes the connection.

    path: of the socket. load: imports the engine; what it returns is what the kit knows of it. driver: makes the driver
    of an engine. orders: functions that the kit may call by name, besides forks. sweep: removes what killed engines
    leave behind.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        lines = connection.makefile("rw", encoding="utf-8")
        try:
            hello = load()
        except BaseException as error:
            _write(lines, json.dumps({"error": f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS]}))
            raise
        resource_tracker.ensure_running()  # outlives engines that are killed, and removes their shared memory
        gc.collect()
        gc.freeze()  # or each process would copy all of it at its first collection
        _write(lines, json.dumps({"ok": hello}))
        for line in lines:
            order = json.loads(line)
            if "wait" in order:
                answer: Any = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
            elif "order" in order:
                answer = (orders or {})[order["order"]](**order["args"])
            else:
                answer = os.fork()
                if not answer:
                    connection.detach()
                    _become(order, path, driver)
            _write(lines, json.dumps({"ok": answer}))
    sweep()


def _become(order: dict[str, Any], path: str, driver: Callable[[], object]) -> None:
    """Be the process of an engine, and never return."""
    code, leave = 1, os._exit
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # whatever the engine does then
        log, nothing = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        stack = open(order["stack"], "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        os._exit = _told(leave, stack)
        faulthandler.enable(file=2)
        if torch := sys.modules.get("torch"):
            # Its pool of threads is made anew at the first use after a fork, by a step that two threads must not race.
            torch.set_num_threads(torch.get_num_threads())
        gc.unfreeze = lambda: None  # type: ignore[assignment]  # vLLM calls it when it ends, and collects everything
        serve(path, order["id"], driver())
        code = 0
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        leave(code)  # without taking thousands of modules apart


def _told(leave: Callable[[int], NoReturn], stack: TextIO) -> Callable[[int], NoReturn]:
    """`os._exit`, but that this process, though not its forks, says first where it was called."""
    process = os.getpid()

    def told(status: int) -> NoReturn:
        if os.getpid() == process:
            faulthandler.dump_traceback(stack)
        leave(status)

    return told


def serve(path: str, identity: str, driver: object) -> None:
    """Answer calls until the kit closes the connection."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        lines = connection.makefile("rw", encoding="utf-8")
        _write(lines, json.dumps({"hello": identity, "process": os.getpid()}))
        for line in lines:
            order = json.loads(line)
            try:
                # Numbers may be a connector's own, of numpy or torch.
                answer = json.dumps({"ok": getattr(driver, order["call"])(**order["args"])}, default=operator.index)
            except Exception as error:
                where = traceback.format_exc()
                print(where, flush=True)
                said = f"{type(error).__name__}: {error}"
                answer = json.dumps({"error": said[:_MOST_CHARACTERS], "where": where[-_MOST_CHARACTERS:]})
            _write(lines, answer)


def _write(lines: Any, message: str) -> None:
    lines.write(message + "\n")
    lines.flush()
