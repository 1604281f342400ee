"""`kvloom plan`: what a configuration's tiers can do for a model, from speeds that are measured on the spot.

Loading `n` tokens takes `latency + n * bytes per token / bandwidth`, computing them `n / prefill rate`: loading pays
from `latency / (1 / prefill rate - bytes per token / bandwidth)` tokens on, or never.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom import ConfigError, output
from kvloom_tools.configuration import File, load
from kvloom_tools.vllm_groups import Group, groups_of, largest_of, share_of

if TYPE_CHECKING:
    from kvloom import EngineConfig, KVSpec
    from kvloom.inspection import Resolved, TierChoice
    from kvloom_tools.measure import Sample, Speed

_CLEARLY = 1.2
"""The factor by which a slower tier must be faster for this to be no accident."""

_MOST_CHUNK_BYTES = 1 << 30
"""Several of them are in memory at the same time."""

_REMEDY = ". Use a faster store or a serializer that compresses, or remove it"


@dataclass(slots=True)
class Row:
    """One tier."""

    tier: str
    type: str
    capacity_bytes: int | None
    capacity_tokens: int | None = None
    """None for no limit, or not known."""
    bytes_per_token: float | None = None
    """As they are stored."""
    write_bytes_per_second: float | None = None
    read_bytes_per_second: float | None = None
    latency_seconds: float | None = None
    """For one chunk, with nothing else under way."""
    tokens_per_second: float | None = None
    """Tokens that can be read in a second."""
    tail_bytes: int | None = None
    """Bytes of the capacity that the tail of a prompt takes on average, of prompts that end anywhere in a chunk."""
    most_tail_bytes: int | None = None
    """The same at most."""
    break_even_tokens: int | None = None
    """The number of tokens from which on loading beats computing; None for never, or not known."""
    warnings: list[str] = field(default_factory=list)
    error: str = ""
    """The reason why nothing was measured."""


def add(commands: typer.Typer) -> None:
    @commands.command("plan", short_help="Measure what the tiers hold and how fast they are.")
    def plan(
        file: File,
        spec: Annotated[
            str | None,
            typer.Option(metavar="SPEC", help="A KVSpec, a config.json or its directory, or a name in the hub cache."),
        ] = None,
        vllm: Annotated[
            str | None,
            typer.Option(metavar="MODEL", help="A model as vLLM takes it: bytes by group of its layers."),
        ] = None,
        layers: Annotated[int | None, typer.Option(min=1, help="Layers that have KV.")] = None,
        kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of K and V.")] = None,
        head_size: Annotated[int | None, typer.Option(min=1, help="Elements of one head.")] = None,
        dtype: Annotated[str | None, typer.Option(help="Dtype of the KV (default: the model's).")] = None,
        prefill: Annotated[
            str | None, typer.Option("--prefill-tokens-per-second", help="Speed at which the model computes.")
        ] = None,
        params: Annotated[str | None, typer.Option(help="To estimate it, with --flops: parameters, as 8B.")] = None,
        flops: Annotated[str | None, typer.Option(help="Achieved operations a second, as 400T.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Measure the tiers: tokens they hold, how fast they give them, and from how many on that beats recomputing.

        A few chunks are written below plan/ in each store, read, and deleted. Exit status 1 if a tier cannot do that.
        """
        from kvloom_tools.shapes import Given, spec_of

        rate = _prefill(prefill, params, flops)
        config, resolved = load(file)
        groups: list[Group] = []
        if vllm is None:
            sample = _sample(resolved, spec_of(Given(spec, layers, kv_heads, head_size, dtype)), config.chunk_tokens)
        else:
            if (spec, layers, kv_heads, head_size) != (None,) * 4:
                raise ConfigError("--vllm", "vLLM says what there is of the model; remove the other options")
            groups = groups_of(vllm, file, dtype)
            sample = largest_of(groups).sample(resolved)
        share = share_of(groups)
        rows = [_row(choice, sample, rate, share) for choice in resolved.tiers]
        _compare(rows)
        tails = _tails(config, resolved, sample.spec) if vllm is None else [[]]
        if any(tails):
            _add_tails(rows, tails, resolved, sample)
        counts = [len(tail) for tail in tails]
        if as_json:
            about = {
                "chunk_tokens": sample.num_tokens,
                "chunk_bytes": sample.nbytes,
                "prefill_tokens_per_second": rate,
                "prefill_is_estimated": rate is not None and prefill is None,
                "tail_pieces": None if groups else sum(counts) / len(counts),
                "most_tail_pieces": None if groups else max(counts),
                "groups": [group.as_json() for group in groups],
            }
            print(json.dumps({**about, "tiers": [asdict(row) for row in rows]}, indent=2))
        else:
            _print_groups(groups) if groups else _print_sample(sample)
            _print(rows, rate, "as given" if prefill is not None else "estimated from --params and --flops")
            _print_tails(rows, counts)
        raise typer.Exit(1 if any(row.error for row in rows) else 0)


def break_even(*, latency_seconds: float, seconds_per_token: float, prefill: float) -> int | None:
    """Tokens from which on loading is faster than computing; None for never."""
    gain_seconds = 1 / prefill - seconds_per_token
    tokens = latency_seconds / gain_seconds if gain_seconds > 0 else math.inf
    return math.ceil(tokens) if tokens < math.inf else None


def _prefill(prefill: str | None, params: str | None, flops: str | None) -> float | None:
    """Tokens a second; None if nothing was said about it. A forward pass is 2 operations per parameter and token."""
    from kvloom_tools.shapes import quantity

    if prefill is not None:
        return quantity(prefill, "--prefill-tokens-per-second")
    if (params is None) != (flops is None):
        raise ConfigError("--flops, --params", "give both")
    if params is None or flops is None:
        return None
    rate = quantity(flops, "--flops") / (2 * quantity(params, "--params"))
    return quantity(str(rate), "--flops, --params")


def _sample(resolved: Resolved, spec: Any, chunk_tokens: int) -> Sample:
    from kvloom_tools.measure import Sample

    connector = resolved.connector.make(spec)
    sample = Sample(tuple(connector.shape(chunk_tokens)), spec, connector.format, chunk_tokens)
    if sample.nbytes > _MOST_CHUNK_BYTES:
        size, most = output.size(sample.nbytes), output.size(_MOST_CHUNK_BYTES)
        raise ConfigError("chunk_tokens", f"a chunk of this model has {size}, and {most} can be measured; lower it")
    return sample


def _row(choice: TierChoice, sample: Sample, rate: float | None, share: float) -> Row:
    from kvloom_tools.stores import said

    kind = "memory" if choice.backend is None else choice.backend.type
    row = Row(choice.name, kind, choice.capacity)
    if choice.write == "never":
        row.warnings.append("not measured: the configuration says `write: never`, and nothing is written")
        return row
    try:
        speed = _speed(choice, sample)
    except Exception as error:
        row.error = said(error.__cause__ or error)
        return row
    _fill(row, speed, sample, rate, share)
    return row


def _speed(choice: TierChoice, sample: Sample) -> Speed:
    from kvloom.inspection import opened
    from kvloom_tools.measure import measure_memory, measure_store
    from kvloom_tools.stores import for_a_try

    with output.progress(f"measuring {choice.name}"):
        if choice.backend is None or choice.serializer is None:
            return measure_memory(sample)
        serializer = choice.serializer.make(sample.spec)
        if sample.format not in serializer.formats:
            raise ConfigError(f"{choice.path}.serializer", f"{serializer.type!r} does not take this connector's KV")
        with for_a_try(choice) as tried, opened(tried, sample.spec) as store:
            return measure_store(store, serializer, sample)


def _fill(row: Row, speed: Speed, sample: Sample, rate: float | None, share: float) -> None:
    """share: the sample's of all bytes that are stored of its tokens."""
    row.bytes_per_token = speed.blob_bytes / sample.num_tokens / share
    row.write_bytes_per_second = speed.write_bytes_per_second
    row.read_bytes_per_second = speed.read_bytes_per_second
    row.latency_seconds = speed.latency_seconds
    row.tokens_per_second = speed.read_bytes_per_second / row.bytes_per_token
    if row.capacity_bytes is not None:
        pages = -(-speed.blob_bytes // 4096) * 4096
        row.capacity_tokens = int(row.capacity_bytes // pages * sample.num_tokens * share)
        if not row.capacity_tokens:
            row.warnings.append("its capacity is less than one chunk: it will hold nothing")
    if rate is not None:
        seconds_per_token = 1 / row.tokens_per_second if row.tokens_per_second else math.inf
        row.break_even_tokens = break_even(
            latency_seconds=speed.latency_seconds, seconds_per_token=seconds_per_token, prefill=rate
        )
        if row.break_even_tokens is None:
            row.warnings.append(
                f"SLOWER THAN RECOMPUTING: it gives {row.tokens_per_second:,.0f} tokens/s, the model computes "
                f"{rate:,.0f}; every hit in it costs time{_REMEDY if row.type != 'memory' else ''}"
            )
        elif row.capacity_tokens is not None and row.break_even_tokens > row.capacity_tokens > 0:
            row.warnings.append("loading pays only from more tokens on than it holds")


def _tails(config: EngineConfig, resolved: Resolved, spec: KVSpec) -> list[list[int]]:
    """The tokens of each piece of a prompt's tail, for each number of tokens that may be behind whole chunks."""
    import torch

    from kvloom_tools.model import Keys

    keys = Keys(config, resolved, spec)
    chunk_tokens = config.chunk_tokens
    if resolved.tokens.type != "chunked" or len(keys.spans()) < 2:
        return [[]]
    unit = min(end - start for start, end in keys.spans())
    found: list[list[int]] = []
    for length in range(0, chunk_tokens, unit):
        tail = keys.segments(torch.zeros(length, dtype=torch.int32))
        found += [[piece.end - piece.start for piece in tail]] * min(unit, chunk_tokens - length)
    return found


def _add_tails(rows: Sequence[Row], tails: Sequence[Sequence[int]], resolved: Resolved, sample: Sample) -> None:
    """Say in each row what a tail takes. A codec is tried on noise."""
    from kvloom_tools.replay import plan_tiers

    sound = [(row, choice) for row, choice in zip(rows, resolved.tiers, strict=True) if not row.error]
    unbound = replace(resolved, tiers=tuple(replace(choice, capacity=None) for _, choice in sound))
    plans = plan_tiers(unbound, chunk_tokens=sample.num_tokens, spec=sample.spec)
    for (row, _), plan in zip(sound, plans, strict=True):
        sums = [sum(plan.piece(tokens).stored for tokens in tail) for tail in tails]
        row.tail_bytes, row.most_tail_bytes = round(sum(sums) / len(sums)), max(sums)


def _print_tails(rows: Sequence[Row], counts: Sequence[int]) -> None:
    """counts: pieces of the tails of every length."""
    costs = [
        f"{row.tier} {output.size(row.tail_bytes)} (at most {output.size(row.most_tail_bytes)})"
        for row in rows
        if row.tail_bytes is not None
    ]
    if costs:
        pieces = f"{sum(counts) / len(counts):.1f} pieces on average and {max(counts)} at most"
        output.say(f"behind its last whole chunk, a prompt leaves {pieces}: {', '.join(costs)}")


def _compare(rows: Sequence[Row]) -> None:
    """Tiers should be in order, fast to slow."""
    for above, below in pairwise(rows):
        if (below.tokens_per_second or 0.0) > _CLEARLY * (above.tokens_per_second or math.inf):
            remedy = "measure again, or remove that tier" if above.type == "memory" else "put it in front"
            below.warnings.append(f"faster than {above.tier!r}, which is asked first: {remedy}")


def _print_sample(sample: Sample) -> None:
    output.say(
        f"{sample.spec.model}: {output.size(sample.nbytes // sample.num_tokens)} a token, "
        f"{output.size(sample.nbytes)} a chunk of {sample.num_tokens} tokens"
    )


def _print(rows: Sequence[Row], rate: float | None, origin: str) -> None:
    """origin: of the rate."""
    if rate is None:
        output.say("recomputing: not known; nothing is measured of the model: say --prefill-tokens-per-second")
    else:
        output.say(f"recomputing: {rate:,.0f} tokens/s, {origin}")
    columns = ("holds", "write", "read", "latency", "per s", "pays from")
    title = "tokens that each tier holds, gives per second, and from which on it pays"
    output.print_table(title, ("tier", *columns), [_cells(row, rate) for row in rows], right=columns)
    for row in rows:
        for text in filter(None, (*row.warnings, row.error and f"not measured: {row.error}")):
            output.say(f"{row.tier}: {text}")


def _print_groups(groups: Sequence[Group]) -> None:
    columns = ("layers", "chunk", "blobs", "a token")
    alike = Counter(
        (group.kind, group.layers, group.chunk_tokens, group.parts, group.bytes_per_token) for group in groups
    )
    cells = [
        (f"{count} x {kind}" if count > 1 else kind, str(layers), f"{chunk:,}", str(parts), output.size(size))
        for (kind, layers, chunk, parts, size), count in alike.items()
    ]
    total = output.size(sum(group.bytes_per_token for group in groups))
    title = f"bytes stored a token by group of layers: {total} in all, from all ranks"
    output.print_table(title, ("group", *columns), cells, right=columns)
    if any(group.state for group in groups):
        output.say("states: at most, as they are kept only where a prompt or a step ends")


def _cells(row: Row, rate: float | None) -> tuple[str, ...]:
    if row.read_bytes_per_second is None or row.write_bytes_per_second is None or row.tokens_per_second is None:
        return (row.tier, *("-",) * 6)
    pays = "-" if rate is None else "never" if row.break_even_tokens is None else f"{row.break_even_tokens:,}"
    return (
        row.tier,
        "no limit" if row.capacity_tokens is None else f"{row.capacity_tokens:,}",
        output.rate(row.write_bytes_per_second),
        output.rate(row.read_bytes_per_second),
        output.seconds(row.latency_seconds or 0.0),
        f"{row.tokens_per_second:,.0f}",
        pays,
    )
