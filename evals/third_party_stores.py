"""Holds other people's key-value stores, each behind a thin adapter, to the requirements of a storage backend.

    python evals/third_party_stores.py [TYPE ...]

Writes evals/third_party_stores.json and .md. The adapters are in testkit/tests/stores.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from importlib import import_module, metadata
from pathlib import Path

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
SECONDS = 300.0


def check(name: str) -> list[dict[str, str]]:
    """In this process: what became of each requirement."""
    from kvloom_testkit import checking, subjects

    sys.path.insert(0, str(TESTS))
    module, cls = STORES[name][0].split(":")
    found = getattr(import_module(module), cls)
    settings = {"path": "{tmp}/store"} if "path" in found.Config.model_fields else {}
    rows = checking.check(subjects.Subject("backend", name, found, settings))
    return [{"id": row.id, "title": row.title, "outcome": row.outcome, "reason": row.reason} for row in rows]


def run(name: str) -> dict[str, object]:
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


def main(names: list[str]) -> None:
    if names[:1] == ["--check"]:
        print("\n" + json.dumps(check(names[1])))
        return
    path = Path(__file__).with_suffix(".json")
    results = {one["type"]: one for one in json.loads(path.read_text())} if path.exists() else {}
    for name in names or STORES:
        results[name] = run(name)
        rows = results[name]["rows"]
        print(
            name, [row["id"] for row in rows if row["outcome"] == "not met"], results[name].get("died", ""), flush=True
        )
    path.write_text(json.dumps([results[name] for name in STORES if name in results], indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
