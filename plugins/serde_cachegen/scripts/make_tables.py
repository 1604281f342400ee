"""Writes csrc/tables.h: the constants that are part of the format. They never change; a new set is a new version of it.

python scripts/make_tables.py > csrc/tables.h
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence

PRECISION = 10
"""Frequencies of a table add up to 2**PRECISION."""
SYMBOLS = 64
"""62 values, -31 to 30 about the centre, the escape, and one that is never used."""
ESCAPE = 62
SCALES = [2.0 ** (-3 + 7.2 * i / 31) for i in range(32)]
"""Standard deviations in quantiser steps."""
LAST_STEP = 160
"""The code of a step of 1; eight codes are a factor of two."""


def laplace(scale: float) -> Callable[[float], float]:
    rate = math.sqrt(2) / scale
    return lambda x: 0.5 * math.exp(x * rate) if x < 0 else 1 - 0.5 * math.exp(-x * rate)


def gauss(scale: float) -> Callable[[float], float]:
    return lambda x: 0.5 * (1 + math.erf(x / scale / math.sqrt(2)))


def frequencies(cdf: Callable[[float], float]) -> list[int]:
    """Slots for each value. Values rarer than half a slot are left to the escape, so that narrow
    tables waste no slots."""
    total = 1 << PRECISION
    p = [cdf(value + 0.5) - cdf(value - 0.5) for value in range(-31, 31)]
    kept = [each * total >= 0.5 for each in p]
    escape = max(1 - sum(each for each, keep in zip(p, kept, strict=True) if keep), 1 / total)
    p, kept = [*p, escape], [*kept, True]
    weight = sum(each for each, keep in zip(p, kept, strict=True) if keep)
    slots = total - sum(kept)
    counts = [
        max(1, math.floor(each / weight * slots + 0.5)) if keep else 0 for each, keep in zip(p, kept, strict=True)
    ]
    counts[counts.index(max(counts))] += total - sum(counts)
    assert sum(counts) == total and min(counts) >= 0
    return [*counts, 0]


def family() -> list[list[int]]:
    return [frequencies(make(scale)) for scale in SCALES for make in (laplace, gauss)]


def costs(counts: Sequence[int]) -> list[int]:
    """1/256 bits of each symbol; an escape has 16 more."""
    bits = [256 * (PRECISION - math.log2(each)) if each else None for each in counts]
    escape = (bits[ESCAPE] or 0) + 16 * 256
    out = [round(escape if each is None else each) for each in bits]
    out[ESCAPE] = round(escape)
    return out


def f32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def rows(values: Sequence[str], per_line: int) -> str:
    return "\n".join(
        "    " + " ".join(f"{v}," for v in values[i : i + per_line]) for i in range(0, len(values), per_line)
    )


def main() -> None:
    tables = family()
    steps = [f32(2.0 ** ((code - LAST_STEP) / 8)) for code in range(256)]
    inverse = [f32(1.0 / step) for step in steps]
    packed = b"".join(struct.pack(f"<{SYMBOLS}H", *each) for each in tables)
    packed += struct.pack("<256f", *steps) + struct.pack("<256f", *inverse)
    print("// Written by scripts/make_tables.py: part of the format, never to be edited.")
    print("// SHA-256 of frequencies (u16), steps and their inverses (f32), little endian:")
    print(f"// {hashlib.sha256(packed).hexdigest()}")
    print("#pragma once\n#include <cstdint>\n\nnamespace kvz {\n")
    print(f"constexpr int kFamily = {len(tables)};")
    print("// Of 1024; 32 scales from 2^-3 to 2^4.2 steps, of each a Laplace and a Gauss distribution.")
    print(f"KVZ_TABLE uint16_t kFrequencies[{len(tables)}][{SYMBOLS}] = {{")
    for each in tables:
        print("  {\n" + rows([str(v) for v in each], 32) + "\n  },")
    print("};\n// In 1/256 bits.")
    print(f"KVZ_TABLE uint16_t kCosts[{len(tables)}][{SYMBOLS}] = {{")
    for each in tables:
        print("  {\n" + rows([str(v) for v in costs(each)], 16) + "\n  },")
    print(f"}};\n// 2^((code - {LAST_STEP}) / 8).\nKVZ_TABLE float kSteps[256] = {{")
    print(rows([float.hex(v) + "f" for v in steps], 6))
    print("};\nKVZ_TABLE float kInverseSteps[256] = {")
    print(rows([float.hex(v) + "f" for v in inverse], 6))
    print("};\n\n}  // namespace kvz")


if __name__ == "__main__":
    main()
