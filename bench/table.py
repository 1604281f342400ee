"""Support for the benchmarks: the KV they move, medians, and the table of results."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from functools import cache
from pathlib import Path

import torch

from kvloom import KVSpec

SPEC = KVSpec(model="bench", num_layers=32, num_kv_heads=8, head_size=128, dtype="bfloat16")
RESULTS = Path(__file__).parent / "results"


def tokens_of(count: int, *, seed: int) -> torch.Tensor:
    return torch.randint(0, 128000, (count,), generator=torch.Generator().manual_seed(seed))


def kv_cache(num_tokens: int, spec: KVSpec = SPEC) -> torch.Tensor:
    kv = torch.empty(spec.blob_shape(num_tokens), dtype=torch.bfloat16)
    return kv.normal_(generator=torch.Generator().manual_seed(0))


def median_seconds(run: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


@cache
def say_once(text: str) -> None:
    print(text, flush=True)


class Rows:
    """Rows of one benchmark, printed as they come and kept in `results/<name>.json`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._rows: list[dict[str, object]] = []
        from rich.console import Console  # not on machines where only the kernels are measured

        self._console = Console()

    def add(self, what: str, value: str, limit: str = "", ratio: float | None = None, **raw: object) -> None:
        row = {"what": what, "measured": value, "limit": limit, "of the limit": "" if ratio is None else f"{ratio:.2f}"}
        self._rows.append({**row, **raw})
        self._console.print("  ".join(text for text in map(str, row.values()) if text), highlight=False)

    def rate(self, what: str, seconds: float, amount: float, limit_seconds: float, limit: str) -> None:
        text = f"{amount / limit_seconds:.1f} {limit}"
        self.add(what, f"{amount / seconds:.1f}", text, limit_seconds / seconds)

    def spread(self, what: str, taken: list[float], amount: float, limits: list[float], limit: str) -> None:
        """Medians and ranges of `amount` over times taken; the ratio is that of the medians."""
        ours, theirs = ([amount / seconds for seconds in sorted(some)] for some in (taken, limits))
        median, limit_median = statistics.median(ours), statistics.median(theirs)
        self.add(
            what,
            f"{median:.2f} ({min(ours):.2f} to {max(ours):.2f})",
            f"{limit_median:.2f} ({min(theirs):.2f} to {max(theirs):.2f}) {limit}",
            median / limit_median,
        )

    def seconds(self, what: str, seconds: float, limit_seconds: float | None = None, limit: str = "") -> None:
        text = "" if limit_seconds is None else f"{limit_seconds * 1e3:.2f} ms {limit}"
        self.add(what, f"{seconds * 1e3:.3f} ms", text, None)

    def micros(self, what: str, seconds: float) -> None:
        self.add(what, f"{seconds * 1e6:.2f}")

    def finish(self) -> None:
        from rich.table import Table

        table = Table(title=self.name)
        names = ["what", "measured", "limit", "of the limit"]
        for name in names:
            table.add_column(name, justify="left" if name == "what" else "right")
        for row in self._rows:
            table.add_row(*(str(row[name]) for name in names))
        self._console.print(table)
        RESULTS.mkdir(exist_ok=True)
        machine = {"cpus": torch.get_num_threads(), "machine": platform.machine(), "python": platform.python_version()}
        about = {"date": date.today().isoformat(), "torch": torch.__version__, **machine}
        path = RESULTS / f"{self.name}.json"
        path.write_text(json.dumps({"about": about, "rows": self._rows}, indent=1) + "\n")
        self._console.print(f"kept in {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
