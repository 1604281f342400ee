"""kvloom beside LMCache 0.5.6, in turn on one machine. `make bench-lmcache` sets up the peer's venv and runs this.

python bench/lmcache_peer.py --peer .venv-lmcache/bin/python --rounds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from table import RESULTS, Rows

HERE = Path(__file__).parent

# ours (row of core_path or disk_path), theirs, and whether more is better
PAIRS = [
    ("keys for a million tokens (Mtok/s)", "keys for a million tokens, builtin hash (Mtok/s)", True),
    ("lookup, all hit (us a chunk), 16 chunks", "lookup, all hit (us a chunk)", False),
    ("store into the memory tier (GB/s)", "store into memory (GB/s)", True),
    ("retrieve from the memory tier (GB/s)", "retrieve from memory (GB/s)", True),
    ("store again what is cached, 4,096 tokens", "store again what is cached (ms)", False),
    ("engine open to the end of the first store", "open, 8 GiB, to the end of the first store (s)", False),
    *(
        (f"disk {mode}: {ours} (GB/s)", f"disk {peer}: {theirs} (GB/s)", True)
        for mode, peer in (("auto", "O_DIRECT"), ("auto", "buffered"), ("never", "buffered"))
        for ours, theirs in (
            ("store until written", "store until written"),
            ("retrieve again", "retrieve warm"),
            ("retrieve, page cache dropped", "retrieve cold"),
        )
    ),
]


def ours(folder: Path) -> dict[str, float]:
    rows: dict[str, float] = {}
    for name, options in (("core_path", []), ("disk_path", ["--dir", str(folder)])):
        subprocess.run([sys.executable, str(HERE / f"{name}.py"), *options], check=True, stdout=subprocess.DEVNULL)
        for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
            value = float(str(row["measured"]).split()[0])
            rows[row["what"]] = value / 1e3 if "open" in row["what"] else value
    return rows


def theirs(python: Path, folder: Path) -> dict[str, float]:
    path = folder / "peer.json"
    command = [str(python), str(HERE / "lmcache" / "measure.py"), "--dir", str(folder), "--json", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found: dict[str, float] = json.loads(path.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, default=Path(".venv-lmcache/bin/python"))
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    us: list[dict[str, float]] = []
    them: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="kvloom-bench-", dir=args.dir) as folder, Console().status("") as status:
        for index in range(args.rounds):
            status.update(f"round {index + 1} of {args.rounds}: kvloom")
            us.append(ours(Path(folder)))
            status.update(f"round {index + 1} of {args.rounds}: LMCache")
            them.append(theirs(args.peer, Path(folder)))
    rows = Rows("lmcache_peer")
    for what, name, more in PAIRS:
        mine = [run[what] for run in us if what in run]
        values = [run[name] for run in them if name in run]
        if mine and values:
            median, peer = statistics.median(mine), statistics.median(values)
            factor = median / peer if more else peer / median
            spread = f"{median:.4g} ({min(mine):.4g} to {max(mine):.4g})"
            peers = f"{peer:.4g} ({min(values):.4g} to {max(values):.4g}) LMCache, {name}"
            rows.add(what, spread, peers, factor, kvloom=mine, lmcache=values)
    rows.finish()


if __name__ == "__main__":
    main()
