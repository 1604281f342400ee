"""Many replays in one pass over a trace: configurations, each with every combination of the capacities to try."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloom import ConfigError, TokenDatabase, check_folder, output, replace_file
from kvloom_tools.replay import Replay, TierPlan, Trace, plan_tiers

if TYPE_CHECKING:
    from kvloom_tools.replay.memory import Memory
    from kvloom_tools.replay.stored import Stored

NO_LIMIT = "without limits"
_MOST_BYTES = 1 << 40
"""Largest size of the KV of one token: no model comes near."""
_MOST_DIGITS = 18
"""Maximum number of digits of a number on the command line."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line."""

    spec: str | None
    bytes_per_token: float | None
    capacities: Mapping[str, Sequence[int]]
    """By tier."""
    ratios: Mapping[str, float]
    tenants: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Run:
    """One configuration under the trace."""

    config: str
    """Its file; empty for the run that keeps everything."""
    capacities: Mapping[str, int]
    """Those that were tried."""
    replay: Replay
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        tried = ", ".join(f"{tier} {output.size(nbytes)}" for tier, nbytes in self.capacities.items())
        return ": ".join(part for part in (self.config or NO_LIMIT, tried) if part)

    def result(self) -> dict[str, Any]:
        """The run as JSON. Hit rates are shares of the requested tokens; bytes are those of stored blobs."""
        sums, chunk_tokens = self.replay.sums, self.replay.chunk_tokens
        hits = sum(sums.hit_chunks.values())
        hit_tokens = sum(sums.hit_tokens(chunk_tokens).values())
        return {
            "config": self.config or None,
            "capacities": dict(self.capacities),
            "chunk_tokens": chunk_tokens,
            "requests": sums.requests,
            "whole": sums.whole,
            "partly": sums.partly,
            "hit_tokens": hit_tokens,
            "hit_rate": hit_tokens / max(1, sums.asked_tokens),
            "chunk_hit_rate": hits / max(1, sums.asked_chunks),
            "unfit_lines": sums.unfit,
            "tiers": [self._tier(tier) for tier in (self.replay.memory, *self.replay.stored) if tier is not None],
        }

    def _tier(self, tier: Memory | Stored) -> dict[str, Any]:
        plan, sums = tier.plan, self.replay.sums
        hit_tokens = sums.hit_tokens(self.replay.chunk_tokens)[plan.name]
        hit_pieces = Counter({tokens: count for (name, tokens), count in sums.hit_pieces.items() if name == plan.name})
        stored = tier.stored + getattr(tier, "promoted", 0)
        return {
            "tier": plan.name,
            "type": plan.type,
            "capacity": plan.capacity,
            "hit_tokens": hit_tokens,
            "hit_rate": hit_tokens / max(1, sums.asked_tokens),
            "read_bytes": _moved_bytes(plan, sums.hit_chunks[plan.name], hit_pieces),
            "written_bytes": _moved_bytes(plan, stored - tier.pieces.total(), tier.pieces),
            "stored_chunks": tier.stored,
            "dropped_chunks": tier.dropped,
            "evicted": dict(tier.evicted),
            "held_chunks": len(tier),
            "held_bytes": tier.used,
            "chunk_bytes": plan.stored_bytes,
        }


def _moved_bytes(plan: TierPlan, chunks: int, pieces: Mapping[int, int]) -> int:
    """pieces: how many, by their tokens."""
    return chunks * plan.moved_bytes + sum(count * plan.piece(tokens).moved for tokens, count in pieces.items())


def runs(configs: Sequence[Path], options: Options) -> list[Run]:
    """One for each configuration and combination of capacities, and one that keeps everything. Raises ConfigError."""
    from kvloom_tools.configuration import load
    from kvloom_tools.shapes import Given, spec_of

    if options.spec is not None and options.bytes_per_token is not None:
        raise ConfigError("--bytes-per-token", "cannot be used together with --spec")
    if not 0 < (1 if options.bytes_per_token is None else options.bytes_per_token) < _MOST_BYTES:
        raise ConfigError("--bytes-per-token", f"should be more than 0 and less than {_MOST_BYTES}")
    by_size = Given(model=options.spec, option="--spec", instead="--bytes-per-token")
    spec = None if options.spec is None else spec_of(by_size)
    found = []
    named = _short_names(configs)
    plans: list[TierPlan] = []
    tiers: set[str] = set()
    for path in configs:
        try:
            config, resolved = load(path)
        except ConfigError as error:
            raise (
                error if len(configs) == 1 or error.path == str(path) else ConfigError(str(path), str(error))
            ) from None
        known = {tier.name for tier in resolved.tiers}
        tails = config.save_tails or resolved.tokens.cls.pieces is TokenDatabase.pieces  # else it has its own way
        if strangers := sorted(options.capacities.keys() - known):
            raise ConfigError("--capacity", f"{path} has no tier {strangers[0]!r}; it has: {', '.join(sorted(known))}")
        tiers |= known
        for sizes in product(*options.capacities.values()):
            tried = dict(zip(options.capacities, sizes, strict=True))
            changed = replace(
                resolved,
                tiers=tuple(replace(one, capacity=tried.get(one.name, one.capacity)) for one in resolved.tiers),
            )
            plans = plan_tiers(
                changed, chunk_tokens=config.chunk_tokens, spec=spec, bytes_per_token=options.bytes_per_token,
                ratios={name: part for name, part in options.ratios.items() if name in known},
            )  # fmt: skip
            engine = Replay(plans, chunk_tokens=config.chunk_tokens, tenants=options.tenants, save_tails=tails)
            found.append(Run(named[path], tried, engine, tuple(_notes(plans, options.tenants))))
    if strangers := sorted(options.ratios.keys() - tiers):
        raise ConfigError("--ratio", f"there is no tier {strangers[0]!r}; there are: {', '.join(sorted(tiers))}")
    limited = {name for run in found for plan in run.replay.plans for name in plan.quota or {}}
    if strangers := sorted(options.tenants.keys() - limited):
        raise ConfigError("--salt", f"no tier has a quota for {strangers[0]!r}")
    first = found[0].replay
    like = first.plans[0]
    all_of_it = TierPlan(
        "everything", "dict", None, like.stored_bytes, like.moved_bytes, like.landed_bytes, piece=like.piece
    )
    ceiling = Replay([all_of_it], chunk_tokens=first.chunk_tokens, save_tails=first.save_tails)
    return [*found, Run("", {}, ceiling)]


def _notes(plans: Sequence[TierPlan], tenants: Mapping[str, int]) -> list[str]:
    notes = []
    for plan in plans:
        if plan.write == "never":
            notes.append(f"{plan.name} is only read, and starts empty: the replay does not know what others put there")
        if plan.evicts_itself:
            notes.append(
                f"{plan.name} evicts by itself; here it has no limit unless you give --capacity {plan.name}=..."
            )
        strangers = sorted((plan.quota or {}).keys() - tenants.keys() - {"*"})
        if strangers:
            notes.append(f"{plan.name} has a quota for {strangers[0]!r}; say which it is: --salt {strangers[0]}=0")
    return notes


def replay(source: Trace, found: Sequence[Run]) -> float:
    """Feed the trace to all; how long that took in seconds."""

    total = max(1, source.path.stat().st_size) if source.path.is_file() else 1
    feeds = [run.replay.feed for run in found]
    began = time.monotonic()
    read = shown = 0
    collecting = gc.isenabled()
    gc.disable()  # nothing here is in a cycle, and millions of entries are much to look through
    try:
        with output.progress(f"replaying {source.path.name}, percent", 100) as step:

            def progress(num_bytes: int) -> None:
                nonlocal read, shown
                read += num_bytes
                while shown < min(100, 100 * read // total):
                    step()
                    shown += 1

            for line in source.requests(progress):
                for feed in feeds:
                    feed(line)
    finally:
        if collecting:
            gc.enable()
    return time.monotonic() - began


def _short_names(configs: Sequence[Path]) -> dict[Path, str]:
    names = [path.name for path in configs]
    return {path: path.name if names.count(path.name) == 1 else str(path) for path in configs}


# -- options -----------------------------------------------------------------------------------------------------------


def byte_size(text: str, option: str) -> int:
    from pydantic import TypeAdapter, ValidationError

    from kvloom import ByteSize

    try:
        value = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        value = 0
    if value <= 0:
        raise ConfigError(option, f"{text!r} should be a size such as 8GiB")
    return value


def capacities(options: Sequence[str]) -> dict[str, list[int]]:
    """`memory=8GiB,16GiB`. Raises ConfigError."""
    return {
        name: [byte_size(size.strip(), "--capacity") for size in text.split(",")]
        for name, text in _pairs(options, "--capacity", "memory=8GiB,16GiB")
    }


def numbers(options: Sequence[str], option: str) -> dict[str, float]:
    """`disk=0.3`. Raises ConfigError."""
    found = {}
    for name, text in _pairs(options, option, "disk=0.3"):
        try:
            found[name] = float(text)
        except ValueError:
            found[name] = 0.0
        if not 0 < found[name] < 100:
            raise ConfigError(option, f"{text!r} should be a number such as 0.3")
    return found


def integers(options: Sequence[str], option: str) -> dict[str, int]:
    """`team-a=0`. Raises ConfigError."""
    found = {}
    for name, text in _pairs(options, option, "team-a=0"):
        if not text.isdecimal() or len(text) > _MOST_DIGITS:
            raise ConfigError(option, f"{text!r} should be the number of a salt in the trace")
        found[name] = int(text)
    return found


def _pairs(options: Sequence[str], option: str, example: str) -> list[tuple[str, str]]:
    pairs = []
    for text in options:
        name, equals, value = text.rpartition("=")
        if not (name and equals and value):
            raise ConfigError(option, f"{text!r} should be like {example}")
        pairs.append((name, value))
    return pairs


# -- the chart ---------------------------------------------------------------------------------------------------------


def check_chart(path: Path, *, force: bool) -> None:
    """Before hours of replaying. force: write over a chart that is there. Raises ConfigError."""
    if path.suffix not in (".png", ".svg"):
        raise ConfigError("--chart", f"{path.name!r} should end in .png or .svg")
    if not path.parent.is_dir():
        raise ConfigError("--chart", f"there is no directory {str(path.parent)!r}; make it")
    if path.exists() and not force:
        raise ConfigError("--chart", f"{path} exists already; choose another name, or overwrite it with --force")
    if path.is_dir():
        raise ConfigError("--chart", f"{path} is a directory; name a file")
    try:
        check_folder(path.parent)
    except OSError as error:
        raise ConfigError("--chart", f"{path} cannot be written ({error.strerror}); choose another name") from None
    if find_spec("matplotlib") is None:
        raise ConfigError("--chart", "matplotlib is not installed; pip install matplotlib, or leave --chart out")


def draw(found: Sequence[Run], path: Path) -> None:
    """Hit rate against capacity, or beside each other by tier if there is one run of each. Raises ConfigError."""
    from matplotlib.figure import Figure

    *tried, ceiling = found
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    _curves(axes, tried) if tried[0].capacities and len(tried) > 1 else _bars(axes, tried)
    most = 100 * ceiling.result()["hit_rate"]
    axes.axhline(most, color="#9aa5b1", linestyle="--", label=f"{NO_LIMIT}: {most:.1f} %")
    axes.set_ylim(0, max(5.0, min(100.0, 1.15 * most)))
    axes.set_ylabel("tokens that were hits, in percent")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=150, format=path.suffix[1:])
    try:
        replace_file(path, drawn.getvalue())
    except OSError as error:
        raise ConfigError(str(path), f"cannot be written: {error.strerror}") from None


def _curves(axes: Any, tried: Sequence[Run]) -> None:
    """The first tier whose capacity was varied along the axis; a line for each of everything else."""
    swept = next((name for name in tried[0].capacities if len({run.capacities[name] for run in tried}) > 1), None)
    swept = swept or next(iter(tried[0].capacities))
    lines: dict[tuple[str, ...], list[Run]] = {}
    for run in tried:
        rest = (f"{name} {output.size(size)}" for name, size in run.capacities.items() if name != swept)
        lines.setdefault((run.config, *rest), []).append(run)
    for label, some in lines.items():
        some.sort(key=lambda run: run.capacities[swept])
        sizes = [run.capacities[swept] / (1 << 30) for run in some]
        results = [run.result() for run in some]
        (line,) = axes.plot(sizes, [100 * one["hit_rate"] for one in results], marker="o", label=", ".join(label))
        if len(results[0]["tiers"]) > 1:
            fastest = [100 * one["tiers"][0]["hit_rate"] for one in results]
            text = f"of which {results[0]['tiers'][0]['tier']}"
            axes.plot(sizes, fastest, marker=".", linestyle=":", color=line.get_color(), label=text)
    axes.set_xscale("log", base=2)
    ticks = sorted({run.capacities[swept] for run in tried})
    axes.set_xticks([size / (1 << 30) for size in ticks], [output.size(size) for size in ticks])
    axes.set_xlabel(f"capacity of {swept}")


def _bars(axes: Any, tried: Sequence[Run]) -> None:
    """A bar for each run, its tiers one on the other."""
    results = [run.result() for run in tried]
    names = list(dict.fromkeys(tier["tier"] for result in results for tier in result["tiers"]))
    bottom = [0.0] * len(tried)
    for name in names:
        heights = [sum(100 * t["hit_rate"] for t in result["tiers"] if t["tier"] == name) for result in results]
        axes.bar([run.label for run in tried], heights, bottom=bottom, label=name, width=0.5)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
