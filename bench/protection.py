"""Measures the cost of signing and encrypting: a chunk framed and verified, beside the checksums that every blob has.

python bench/protection.py
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable

from table import Rows

from kvloom import envelope
from kvloom.format.encryption import Protection

KEY = "f" * 32 + "/-/0-" + "a" * 64
BUFFERS, BYTES = 64, 32 << 20
"""A chunk of 256 tokens of an 8B model: K and V of 32 layers."""
ROUNDS = 15


def main() -> None:
    key = os.urandom(32)
    ways = {"checksums": None, "sign": Protection("sign", [key]), "encrypt": Protection("encrypt", [key])}
    step = BYTES // BUFFERS
    payload = mmap.mmap(-1, BYTES)
    payload[:] = os.urandom(BYTES)
    buffers = [memoryview(payload)[at : at + step] for at in range(0, BYTES, step)]
    about = envelope.Description(KEY, "raw", (2, 32, 256, 1024), "bfloat16", "kv_blob", 256, "exact")
    blobs = {name: b"".join(envelope.seal(about, buffers, way)) for name, way in ways.items()}
    landing = mmap.mmap(-1, len(blobs["sign"]))
    taken: dict[tuple[str, str], list[float]] = {(what, name): [] for what in ("write", "read") for name in ways}
    for number in range(ROUNDS + 2):
        for name, way in ways.items():
            landing[:] = blobs[name]
            view = memoryview(landing)

            def read(view: memoryview = view, way: Protection | None = way) -> None:
                verifier = envelope.Verifier(view, key=KEY, protection=way)
                for end in range(step, len(view) + step, step):
                    verifier.filled(min(end, len(view)))
                verifier.finish()

            calls: dict[str, Callable[[], object]] = {
                "write": lambda way=way: envelope.seal(about, buffers, way),  # type: ignore[misc]
                "read": read,
            }
            for what, call in calls.items():
                began = time.perf_counter()
                call()
                if number >= 2:
                    taken[what, name].append(time.perf_counter() - began)
    rows = Rows("protection")
    for (what, name), seconds in taken.items():
        base = statistics.median(taken[what, "checksums"])
        middle = statistics.median(seconds)
        rows.add(
            f"{what}, {name}",
            f"{BYTES / middle / 1e9:.1f} GB/s ({BYTES / max(seconds) / 1e9:.1f} to {BYTES / min(seconds) / 1e9:.1f})",
            f"{1e3 * middle / (BYTES / 1e9):.0f} ms per GB, {1e3 * (middle - base) / (BYTES / 1e9):.0f} more",
            base / middle,
        )
    rows.finish()


if __name__ == "__main__":
    main()
