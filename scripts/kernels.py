"""Write a table of what the compiler made of each CUDA kernel: bench/results/kernels.md. Needs nvcc, c++ and no GPU.

Registers, spills and static shared memory are those that ptxas names. Occupancy follows from them, from the threads and
the shared memory of a launch, and from the limits of a multiprocessor of an H100 or H200 (sm_90). Without nvcc it says
so and changes nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "bench/results/kernels.md"
SOURCES = {
    "plugins/serde_cachegen/csrc/cuda.cu": ("--fmad=false", "-diag-suppress", "20091"),
    "plugins/connector_vllm/csrc/paged.cu": (),
    "plugins/blend/csrc/rotate.cu": ("--fmad=false",),
}
"""Each with the options that decide what it computes."""
LAUNCHES = {
    "check_streams": ("kThreads", "0"), "number_tiles": ("32", "0"), "decode_tiles": ("kTileThreads", "kDecodeShared"),
    "restore_tokens": ("kThreads", "kRestoreShared"), "decode_runs": ("kThreads", "kWarps * WarpWords::kBytes"),
    "scale_tokens": ("kThreads", "0"), "measure_channels": ("kThreads", "0"), "choose_steps": ("kThreads", "0"),
    "find_sinks": ("kThreads", "0"),
    "encode_tiles": ("kTileThreads", "encode_shared(kStep)"), "write_directories": ("32", "0"),
    "place_tiles": ("32", "0"), "count_symbols": ("kThreads", "kWarps * 256 * 4"), "make_tables": ("256", "256 * 6"),
    "encode_runs": ("kThreads", "kWarps * 512 * 4"), "write_run_directories": ("32", "0"),
    "place_runs": ("kThreads", "0"), "move_rows": ("256", "0"), "copy_tables": ("256", "0"),
    "rotate_rows": ("256", "0"),
}  # fmt: skip
"""Threads of a block and bytes of shared memory beside the static, of each kernel, as the sources call them."""
REGISTERS, WARPS, BLOCKS, SHARED = 65536, 64, 32, 233472
"""Of a multiprocessor of sm_90."""
_RESERVED = 1024
"""Bytes of shared memory that each block takes besides its own."""


class Kernel(NamedTuple):
    name: str
    registers: int
    spilled: int
    """Bytes that are stored to local memory and loaded again."""
    static: int
    """Bytes of shared memory."""


def main() -> None:
    if shutil.which("nvcc") is None:
        print("kernels: left out, because there is no nvcc")
        return
    launches = numbers()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(compiled, SOURCES))
    version = run("nvcc", "--version").stdout.split("release ")[1].split(",")[0]
    lines = [
        "# Kernels, as compiled",
        "",
        f"nvcc {version}, sm_90. By `make kernels`. Shared memory is that of a block. Warps: of the 64 that a",
        "multiprocessor holds, and what limits them.",
    ]
    for source, kernels in zip(SOURCES, found, strict=True):
        lines += ["", f"## {source}", "", "| kernel | registers | bytes spilled | shared | threads | warps | limit |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for kernel in sorted(kernels):
            threads, dynamic = launches[kernel.name.split("<")[0]]
            warps, limit = occupancy(kernel.registers, threads, kernel.static + dynamic)
            lines.append(
                f"| `{kernel.name}` | {kernel.registers} | {kernel.spilled} | {kernel.static + dynamic} | {threads} "
                f"| {warps} | {limit} |"
            )
    TABLE.write_text("\n".join(lines) + "\n")
    print(f"{TABLE.relative_to(ROOT)}: {sum(map(len, found))} kernels")


def compiled(source: str) -> list[Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        said = run(
            "nvcc", "-std=c++17", "-O3", "-gencode", "arch=compute_90,code=sm_90", "-Xptxas", "-v", "--cubin",
            *SOURCES[source], ROOT / source, "-o", f"{folder}/made.cubin",
        ).stderr  # fmt: skip
    return kernels_of(run("c++filt", input=said).stdout)


def kernels_of(said: str) -> list[Kernel]:
    """The kernels of what ptxas says, with demangled names."""
    found, name, spilled = [], "", 0
    for line in said.splitlines():
        if entry := re.search(r"Compiling entry function '(.*)' for", line):
            name = plain(entry[1])
        elif spill := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(spill[1]) + int(spill[2])
        elif used := re.search(r"Used (\d+) registers", line):
            static = re.search(r"(\d+) bytes smem", line)
            found.append(Kernel(name, int(used[1]), spilled, int(static[1]) if static else 0))
    return found


def plain(name: str) -> str:
    """A demangled name without namespaces, return type and arguments, in which enumerators are numbers."""
    name = re.sub(
        r"\([^()]*::[A-Za-z_]+\)|\((?:unsigned )?(?:int|char|bool)\)|kvz::cuda::|kvz::|\(anonymous namespace\)::",
        "",
        name,
    )
    return name.removeprefix("void ").split("(")[0]


def numbers() -> dict[str, tuple[int, int]]:
    """Threads and shared memory of launches, as a C++ compiler finds them in the sources."""
    rows = "".join(f'  printf("{name} %d %d\\n", int({a}), int({b}));\n' for name, (a, b) in LAUNCHES.items())
    code = (
        "#define KVZ_NAMESPACE cuda\n"
        '#include "decode_kernel.h"\n#include "encode_kernel.h"\n'
        '#include "lossless_decode_kernel.h"\n#include "lossless_encode_kernel.h"\n'
        f"#include <cstdio>\nusing namespace kvz;\nusing namespace kvz::cuda;\nint main() {{\n{rows}}}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        command = ["c++", "-std=c++17", "-O0", "-w", "-I", ROOT / "plugins/serde_cachegen/csrc", "-x", "c++", "-"]
        run(*command, "-o", f"{folder}/numbers", input=code)
        said = [line.split() for line in run(f"{folder}/numbers").stdout.splitlines()]
    return {name: (int(threads), int(shared)) for name, threads, shared in said}


def occupancy(registers: int, threads: int, shared: int) -> tuple[int, str]:
    """Warps of a multiprocessor that are at work at once, and what there is too little of for more."""
    warps = -(-threads // 32)
    of_a_warp = -(-registers * 32 // 256) * 256
    most = {
        "registers": REGISTERS // of_a_warp // 4 * 4 // warps,
        "shared memory": SHARED // (shared + _RESERVED),
        "warps": WARPS // warps,
        "blocks": BLOCKS,
    }
    least = min(most.values())
    return least * warps, ", ".join(what for what, blocks in most.items() if blocks == least)


def run(*command: object, input: str | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*map(str, command)], input=input, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]}: {done.stderr.strip()[-2000:]}")
    return done


if __name__ == "__main__":
    main()
