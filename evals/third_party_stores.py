"""Holds other people's key-value stores, each behind a thin adapter, to the requirements of a storage backend.

    python evals/third_party_stores.py [TYPE ... | --table]

Writes evals/third_party_stores.json and .md. The adapters are in testkit/tests/stores.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import textwrap
import time
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "testkit" / "tests"
STORES = {
    "fsspec_memory": ("stores.fsspec_stores:FsspecMemory", "fsspec"),
    "fsspec_local": ("stores.fsspec_stores:FsspecLocal", "fsspec"),
    "zarr_memory": ("stores.zarr_stores:ZarrMemory", "zarr"),
    "zarr_local": ("stores.zarr_stores:ZarrLocal", "zarr"),
    "obstore_memory": ("stores.obstore_stores:ObstoreMemory", "obstore"),
    "obstore_local": ("stores.obstore_stores:ObstoreLocal", "obstore"),
    "diskcache": ("stores.diskcache_store:DiskCache", "diskcache"),
    "sqlite": ("stores.sqlite_store:Sqlite", None),
    "sqlitedict": ("stores.mapping_stores:SqliteDict", "sqlitedict"),
    "dbm_dumb": ("stores.mapping_stores:DbmDumb", None),
    "rocksdict": ("stores.mapping_stores:RocksDict", "rocksdict"),
    "leveldb": ("stores.tree_stores:LevelDb", "plyvel"),
    "lmdb": ("stores.tree_stores:Lmdb", "lmdb"),
    "zodb": ("stores.tree_stores:Zodb", "ZODB"),
}
"""By type: the adapter, and the distribution whose version counts; None: the standard library."""
_PATHS = "keys are paths: one that another one continues (`a`, `a/b`) cannot be both a file and a directory"
WHY = {
    ("fsspec_memory", "B08"): _PATHS,
    ("fsspec_memory", "B33"): "asking whether there is a file and removing it are two steps, with no lock",
    ("fsspec_local", "B08"): _PATHS,
    ("fsspec_local", "B09"): "`pipe_file` opens the file itself for writing, which empties it: readers see a part",
    ("fsspec_local", "B11"): "the same: a reader beside a put finds an empty file",
    ("fsspec_local", "B36"): "the same: a process that is killed meanwhile leaves the part that it has written",
    ("fsspec_local", "B33"): "looking whether a file is there and opening it are two steps, with no lock",
    ("fsspec_local", "B45"): "the same: a put that the system ends leaves a part, which is read as the blob",
    ("zarr_local", "B04"): "`delete` of a key that is the beginning of others removes a directory and all in it",
    ("zarr_local", "B08"): _PATHS,
    ("zarr_local", "B16"): "`list_prefix` takes the prefix for a directory, where `MemoryStore`'s compares text: one "
    "that ends inside a part lists nothing",
    ("zarr_local", "B18"): "a put writes beside the others first, and the listing looks at what is gone by then",
    ("obstore_local", "B04"): "`delete` of a key that is the beginning of others meets a directory, and raises",
    ("obstore_local", "B08"): _PATHS,
    ("obstore_local", "B23"): "its runtime's threads are not in a forked child, where the first call waits for ever",
    ("sqlitedict", "B23"): "a thread that is started by opening does all the work, and is not in a forked child, "
    "where the first call waits for ever",
    ("dbm_dumb", "B09"): "a value that fits is written over in place, with no lock",
    ("dbm_dumb", "B10"): "two puts at once append at the same place of the data file",
    ("dbm_dumb", "B11"): "it has no locks",
    ("dbm_dumb", "B18"): "it lists the dictionary that others change: `RuntimeError`",
    ("dbm_dumb", "B33"): "it is not made for threads: two that write its index rename each other's files away",
    ("dbm_dumb", "B36"): "values are written in place, and the index that says where they end only at `close`",
    ("dbm_dumb", "B42"): "opening sets the umask to 0 and back at once, to learn it",
    ("rocksdict", "B25"): "`close` raises `DbClosedError` the second time",
    ("zodb", "B09"): "writers that meet raise `ConflictError`: who uses it must try again, and the adapter does not",
    ("zodb", "B10"): "the same: of puts at the same time some raise",
    ("zodb", "B11"): "the same",
    ("zodb", "B18"): "the same",
    ("zodb", "B33"): "the same",
}
"""Explanations of the failures."""
OUTCOMES = ("met", "not met", "skipped")
SECONDS = 300.0


def check(name: str) -> list[dict[str, str]]:
    """In this process: what became of each requirement."""
    from kvloom_testkit import subjects
    from kvloom_testkit.cli import check as checking

    sys.path.insert(0, str(TESTS))
    module, cls = STORES[name][0].split(":")
    found = getattr(import_module(module), cls)
    settings = {"path": "{tmp}/store"} if "path" in found.Config.model_fields else {}
    rows = checking.check(subjects.Subject("backend", name, found, settings))
    return [{"id": row.id, "title": row.title, "outcome": row.outcome, "reason": _brief(row.reason)} for row in rows]


def _brief(reason: str) -> str:
    """The first line, and the last where the first one announces it, without the paths of this machine."""
    first, *rest = reason.strip().splitlines() or [""]
    if first.endswith(":") and rest:
        first = f"{first} {rest[-1].strip()}"
    return re.sub(r"/[\w./+-]+/", ".../", first)[:200]


def run(name: str) -> dict[str, Any]:
    """In a process of its own, because a store may take its process with it."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--check", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    seconds = round(time.perf_counter() - began, 1)
    distribution = STORES[name][1]
    version = platform.python_version() if distribution is None else metadata.version(distribution)
    about = {"type": name, "distribution": distribution or "Python", "version": version, "seconds": seconds}
    lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    if not lines:
        return {**about, "died": f"status {done.returncode}: {done.stderr.strip()[-300:]}", "rows": []}
    return {**about, "rows": json.loads(lines[-1])}


def table(results: list[dict[str, Any]]) -> str:
    """The results for people."""
    said = (
        f"{(__doc__ or '').splitlines()[0]} An adapter claims what its store's documentation says; what is not claimed "
        "is not tested. Written by `python evals/third_party_stores.py`."
    )
    lines = ["# Other people's stores, held to the kit", "", *textwrap.wrap(said, 120)]
    lines += ["", "| store | version | met | not met | not claimed |", "|---|---|---|---|---|"]
    for one in results:
        ids = {mark: [row["id"] for row in one["rows"] if row["outcome"] == mark] for mark in OUTCOMES}
        cells = [one["type"], f"{one['distribution']} {one['version']}", str(len(ids["met"]))]
        cells += [", ".join(ids[mark]) or "-" for mark in ("not met", "skipped")]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## What is not met, and why", ""]
    for one in results:
        for row in one["rows"]:
            if row["outcome"] == "not met":
                why = WHY.get((one["type"], row["id"]), row["reason"].splitlines()[0][:200])
                lines.append(f"- **{one['type']} {row['id']}** ({row['title']}): {why}.")
    return "\n".join([*lines, ""])


def main(names: list[str]) -> None:
    if names[:1] == ["--check"]:
        print("\n" + json.dumps(check(names[1])))
        return
    path = Path(__file__).with_suffix(".json")
    results = {one["type"]: one for one in json.loads(path.read_text())} if path.exists() else {}
    for name in () if names == ["--table"] else names or STORES:
        results[name] = run(name)
        rows = results[name]["rows"]
        print(
            name, [row["id"] for row in rows if row["outcome"] == "not met"], results[name].get("died", ""), flush=True
        )
    path.with_suffix(".md").write_text(table([results[name] for name in STORES if name in results]))
    path.write_text(json.dumps([results[name] for name in STORES if name in results], indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
