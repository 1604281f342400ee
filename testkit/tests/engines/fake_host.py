"""A host that forks processes which do what they are told, without an engine: `python -m fake_host SOCKET`."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any


def main(path: str) -> None:
    if os.environ.get("FAKE_HOST") == "breaks":
        raise ImportError("no such engine here")
    connection, lines = _connect(path)
    if os.environ.get("FAKE_HOST") == "refuses":
        _tell(lines, {"error": "ImportError: libcuda is not here"})
        return
    _tell(lines, {"ok": {"version": "0.32.9"}})
    for line in lines:
        order = json.loads(line)
        if "wait" in order:
            _tell(lines, {"ok": os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])})
            continue
        child = os.fork()
        if not child:
            connection.detach()
            _be_an_engine(path, order)
        _tell(lines, {"ok": child})


def _be_an_engine(path: str, order: dict[str, Any]) -> None:
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=open(order["stack"], "w"))  # noqa: SIM115
    _, lines = _connect(path)
    _tell(lines, {"hello": order["id"]})
    status = 0
    for line in lines:
        call = json.loads(line)
        what, arguments = call["call"], call["args"]
        if what == "hang":
            a_place_to_hang()
        elif what == "start_child":
            _tell(lines, {"ok": subprocess.Popen(["sleep", "600"]).pid})
        elif what == "die":
            print("last words", flush=True)
            os.kill(os.getpid(), arguments["signal"])
        elif what == "exit":
            os._exit(arguments["status"])
        elif what == "start":
            _tell(lines, {"error": "RuntimeError: needs a GPU", "where": '  File "/a/b/c.py", line 7, in init\n'})
        elif what == "close":
            _tell(lines, {"ok": None})
            if arguments.get("status"):
                status = arguments["status"]
        elif what == "lingers":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _tell(lines, {"ok": None})
            lines.readline()
            _tell(lines, {"ok": None})
            time.sleep(600)
        else:
            _tell(lines, {"ok": {"heard": call}})
    os._exit(status)


def a_place_to_hang() -> None:
    time.sleep(600)


def _connect(path: str) -> tuple[socket.socket, Any]:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection, connection.makefile("rw", encoding="utf-8")


def _tell(lines: Any, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()


if __name__ == "__main__":
    main(sys.argv[1])
