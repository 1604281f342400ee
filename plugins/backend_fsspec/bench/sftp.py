"""Blobs through OpenSSH's server on this machine: the backend, fsspec's own SFTP, and paramiko's `putfo` and `getfo`.

    python plugins/backend_fsspec/bench/sftp.py [--rounds 5]

All by paramiko, in turn, in one process. fsspec's file system is one connection for one caller, so it is measured with
one at a time only. Medians of the rounds and their spread, in MB/s, and the ratio to fsspec's. Writes
bench/results/sftp.json.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from fsspec.implementations.sftp import SFTPFileSystem

from kvloom_backend_fsspec.backend import FsspecBackend
from kvloom_backend_fsspec.testing import SshServer

SIZES_MIB, BLOBS, THREADS = (1, 4), 4, 4
RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results" / "sftp.json"
Clients = dict[str, tuple[Callable[[str, bytes], Any], Callable[[str], bytes]]]


def clients_of(server: SshServer, directory: str) -> Clients:
    options = {"key_filename": str(server.key), "known_hosts": str(server.known_hosts)}
    url = f"sftp://127.0.0.1:{server.port}{directory}/kvloom"
    ours = FsspecBackend(FsspecBackend.Config(url=url, options=options, threads=THREADS, timeout=60))
    theirs = SFTPFileSystem("127.0.0.1", port=server.port, key_filename=str(server.key), skip_instance_cache=True)
    ftp = SFTPFileSystem(
        "127.0.0.1", port=server.port, key_filename=str(server.key), skip_instance_cache=True
    ).client.open_sftp()

    def getfo(name: str) -> bytes:
        room = io.BytesIO()
        ftp.getfo(f"{directory}/{name}", room)
        return room.getvalue()

    def get(name: str) -> bytes:
        found = ours.get(name)
        assert found is not None
        return bytes(found)

    return {
        "kvloom": (lambda name, blob: ours.put(name, [blob]), get),
        "fsspec": (
            lambda name, blob: theirs.pipe_file(f"{directory}/{name}", blob),
            lambda name: bytes(theirs.cat_file(f"{directory}/{name}")),
        ),
        "paramiko": (lambda name, blob: ftp.putfo(io.BytesIO(blob), f"{directory}/{name}"), getfo),
    }


def measured(act: Callable[[int], Any], size: int, at_once: int) -> float:
    """MB/s of one round."""
    began = time.perf_counter()
    if at_once == 1:
        for number in range(BLOBS):
            act(number)
    else:
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(act, range(BLOBS)))
    return BLOBS * size / (time.perf_counter() - began) / 1e6


def _send(put: Callable[[str, bytes], Any], blobs: list[bytes], number: int) -> None:
    put(f"{number}", blobs[number])


def _check(get: Callable[[str], bytes], blobs: list[bytes], number: int) -> None:
    assert get(f"{number}") == blobs[number]


def rows(clients: Clients, rounds: int) -> Iterator[dict[str, Any]]:
    for mib in SIZES_MIB:
        blobs = [os.urandom(mib << 20) for _ in range(BLOBS)]
        told: dict[tuple[str, int, str], list[float]] = {}
        for turn in range(rounds + 1):
            for name, (put, get) in clients.items():
                send, check = partial(_send, put, blobs), partial(_check, get, blobs)
                for at_once in (1, THREADS) if name == "kvloom" else (1,):
                    for verb, act in (("put", send), ("get", check)):
                        speed = measured(act, mib << 20, at_once)
                        if turn:  # the first one warms up
                            told.setdefault((verb, at_once, name), []).append(speed)
        for (verb, at_once, name), speeds in sorted(told.items(), reverse=True):
            ratios = [one / other for one, other in zip(speeds, told[verb, 1, "fsspec"], strict=True)]
            yield {
                "verb": verb, "MiB": mib, "at_once": at_once, "client": name,
                "median": round(statistics.median(speeds), 1), "least": round(min(speeds), 1),
                "most": round(max(speeds), 1), "of_fsspec": round(statistics.median(ratios), 1),
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    table = []
    with SshServer() as server, tempfile.TemporaryDirectory() as directory:
        for row in rows(clients_of(server, directory), arguments.rounds):
            table.append(row)
            print("  ".join(f"{value!s:>9}" for value in row.values()))
    load = [round(load, 1) for load in os.getloadavg()]
    about = {"cpus": os.cpu_count(), "python": platform.python_version(), "load": load, "rounds": arguments.rounds}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"about": about, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
