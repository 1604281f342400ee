"""Two hosts and three stores: host A prefills, host B answers from A's KV, and in the middle things are killed and cut.

python examples/cluster/run.py [redis] [rgw] [mooncake] [--processes]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from network import Network, network
from rich.console import Console
from rich.table import Table
from stores import STORES, Store

HERE = Path(__file__).parent
DEADLINE_SECONDS = 1.0
BACK_SECONDS = 120.0
console = Console(highlight=False, markup=False, soft_wrap=True)


class Host:
    """`host.py` in a process of its own, on one host of the network."""

    def __init__(self, net: Network, name: str, store: Store, log: Path) -> None:
        tier = {**store.tiers[name], "deadline": f"{DEADLINE_SECONDS}s"}
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | store.environment
        self.log = log
        with open(log, "w") as errors:
            self._process = subprocess.Popen(
                net.command(name, [sys.executable, str(HERE / "host.py"), json.dumps(tier)]),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            )  # fmt: skip

    def do(self, order: str) -> dict[str, Any]:
        """The outcome of an order. Raises RuntimeError with the host's last words."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{order}\n")
            self._process.stdin.flush()
        said = self._process.stdout.readline()
        if not said:
            raise RuntimeError(f"{order}: {self.log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(said)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Round:
    """One store; `row` is what the table says of it, and `wrong` what does not hold."""

    def __init__(self, net: Network, store: Store, a: Host, b: Host) -> None:
        self._net, self._store, self._a, self._b = net, store, a, b
        self.wrong: list[str] = []
        self.row = [store.name]

    def run(self) -> None:
        cold = self._b.do("cold")
        self._a.do("store")
        self._right = cold["text"]
        hit = self._answer("a hit")
        if not hit["hit"]:
            self.wrong.append("host B found nothing of what host A stored")
        self.row += [_ms(cold), _ms(hit), f"{hit['hit']} of {cold['tokens']}"]
        console.print(f"  A prefilled; B found {hit['hit']} tokens: {_ms(hit)} instead of {_ms(cold)}")
        self._outage("killed", self._store.server.kill, self._store.server.restart)
        if self._net.can_cut:
            self._outage("cut off", lambda: self._net.cut("b"), lambda: self._net.heal("b"))
        else:
            self._outage("frozen", self._store.server.freeze, self._store.server.thaw)

    def _outage(self, what: str, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """In the middle of an answer; another answer while it lasts; then until B finds A's KV again."""
        outage = threading.Timer(0.005, begin)
        outage.start()
        during = self._answer(f"{what} in the middle")
        outage.join()
        after = self._answer(f"while {what}")
        if after["hit"]:
            self.wrong.append(f"a hit while {what}: it was no outage")
        end()
        seconds = self._back(what)
        self.row += [f"{_ms(during)} ({during['hit']} hit)", f"{_ms(after)} ({after['hit']} hit)", f"{seconds:.1f} s"]
        console.print(f"  {what} in the middle: {_ms(during)}, {during['hit']} tokens found; then {_ms(after)}")
        console.print(f"  back {seconds:.1f} s after it was over")

    def _answer(self, when: str) -> dict[str, Any]:
        answer = self._b.do("answer")
        if answer["text"] != self._right:
            self.wrong.append(f"another text: {when}")
        return answer

    def _back(self, what: str) -> float:
        began = time.monotonic()
        while time.monotonic() - began < BACK_SECONDS:
            self._a.do("store")
            if self._answer(f"after it was {what}")["hit"]:
                return time.monotonic() - began
        self.wrong.append(f"not back {BACK_SECONDS:.0f} s after it was {what}")
        return BACK_SECONDS


def _ms(answer: dict[str, Any]) -> str:
    return f"{1000 * answer['seconds']:.0f} ms"


@contextlib.contextmanager
def _hosts(net: Network, store: Store, logs: Path) -> Iterator[tuple[Host, Host]]:
    with contextlib.ExitStack() as stack:
        # A first: in Mooncake it has the memory that B's start asks for.
        a = stack.enter_context(contextlib.closing(Host(net, "a", store, logs / f"{store.name}-a.log")))
        a.do("cold")
        b = stack.enter_context(contextlib.closing(Host(net, "b", store, logs / f"{store.name}-b.log")))
        yield a, b


def _round(net: Network, name: str, table: Table, logs: Path) -> list[str]:
    """Problems found. A store that is not installed is reported, but is not a problem."""
    console.print(f"{name}: starting")
    try:
        with STORES[name](net) as store, _hosts(net, store, logs) as hosts:
            one = Round(net, store, *hosts)
            one.run()
    except (ImportError, RuntimeError) as error:
        console.print(f"  not done: {error}")
        table.add_row(name, "not done: see above")
        return [] if "install" in str(error) or isinstance(error, ImportError) else [str(error)]
    table.add_row(*one.row)
    return [f"{store.name}: {what}" for what in one.wrong]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stores", nargs="*", metavar="STORE", help=f"of {', '.join(STORES)}; by default all")
    parser.add_argument("--processes", action="store_true", help="no network namespaces, also where they are allowed")
    arguments = parser.parse_args()
    if unknown := set(arguments.stores) - set(STORES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(STORES)}")
    net, why_not = network(arguments.processes)
    if net.can_cut:
        console.print("Hosts A and B are network namespaces, each with a cable that can be pulled.")
    else:
        console.print(f"Hosts A and B are processes of one network ({why_not}): instead of a cable that is pulled, the "
                      "store is frozen.")  # fmt: skip
    last = "B cut off" if net.can_cut else "store frozen"
    table = Table(title="time to the first token at host B, and how many tokens it found", title_justify="left")
    for column in ("store", "cold", "hit", "found", "store killed", "while killed", "back after", last, "meanwhile",
                   "back after"):  # fmt: skip
        table.add_column(column)
    wrong: list[str] = []
    with net, tempfile.TemporaryDirectory(prefix="kvloom-cluster-") as logs:
        for name in arguments.stores or STORES:
            wrong += _round(net, name, table, Path(logs))
    Console(width=max(console.width, 130)).print(table)
    console.print("\n".join(wrong) or "Every text was the one that the model gives without kvloom.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
