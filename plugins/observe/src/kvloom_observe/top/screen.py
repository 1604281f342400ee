"""A snapshot as a screen of text: tiers, hit rate, misses, the hottest prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

_UNWELL = ("read only", "neglected", "degraded")
_MOST_CHARS = 200
"""Maximum number of characters of each text."""
_STYLES = {"ok": "green", "paused": "red", "stuck": "red", **dict.fromkeys(_UNWELL, "yellow")}


def screen(told: dict[str, Any], before: dict[str, Any] | None = None, *, note: str = "") -> RenderableType:
    """before: an earlier snapshot, to compute rates that the snapshot lacks. note: a last line.

    Raises ValueError for anything but a snapshot.
    """
    try:
        return _screen(_printable(told), before, note)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError):
        raise ValueError("this is not the answer of a kvloom engine") from None


def _printable(told: Any) -> Any:
    """The same, with texts that do nothing to a terminal."""
    if isinstance(told, dict):
        return {_printable(key): _printable(value) for key, value in told.items()}
    if isinstance(told, list):
        return [_printable(one) for one in told]
    if isinstance(told, str):
        return "".join(char if char.isprintable() else "?" for char in told[:_MOST_CHARS])
    return told


def _screen(told: dict[str, Any], before: dict[str, Any] | None, note: str) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [
        Text(_headline(told), style="bold"),
        Text(_requests(told, before)),
        Text(_saved(told)),
    ]
    tiers = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("tier", "state", "holds", "full", "hits", "read", "p50", "p99", "queue"):
        tiers.add_column(name, justify="left" if name in ("tier", "state") else "right", no_wrap=True)
    everything = sum(tier["served_tokens"] for tier in told["tiers"])
    for tier in told["tiers"]:
        share = f"{tier['served_tokens'] / everything:.0%}" if everything else "-"
        read, num_bytes = tier["read_seconds"], tier["read_bytes"]
        tiers.add_row(
            Text(tier["name"]), Text(tier["state"], style=_STYLES.get(tier["state"], "")), size(tier["bytes"]),
            _full(tier), share, "-" if num_bytes is None else size(num_bytes), seconds(read["p50"]),
            seconds(read["p99"]), size(tier["waiting_bytes"]),
        )  # fmt: skip
    parts += [Text(""), tiers, Text("")]
    for tier in told["tiers"]:
        if tier["state"] != "ok" and tier["reason"]:
            parts.append(Text(f"{tier['name']}: {tier['reason']}"[:200], style="red"))
    parts.append(Text("missed    " + _reasons(told["missed"], "tokens")))
    parts.append(Text("evicted   " + _reasons(told["evicted"], "chunks")))
    if told["dropped"]:
        parts.append(Text("dropped   " + _reasons(told["dropped"], "chunks")))
    if told["prefixes"]:
        prefixes = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for name in ("hottest prefix", "tokens", "hits", "tokens saved"):
            prefixes.add_column(name, justify="left" if name == "hottest prefix" else "right")
        for one in told["prefixes"][:8]:
            prefixes.add_row(Text(one["digest"]), f"{one['tokens']:,}", f"{one['hits']:,}", f"{one['saved_tokens']:,}")
        parts += [Text(""), prefixes]
    if note:
        parts.append(Text(note, style="yellow"))
    return Group(*parts)


def _headline(told: dict[str, Any]) -> str:
    engine = told["engine"]
    process = f", process {engine['pid']}" if engine["pid"] else ""
    return (
        f"{engine['instance_id']}: {engine['model']} ({engine['fingerprint'][:8]}){process}, kvloom {engine['kvloom']}"
    )


def _requests(told: dict[str, Any], before: dict[str, Any] | None) -> str:
    requests = told["requests"]
    asked, served = requests["asked_tokens"], requests["served_tokens"]
    rate = f"{served / asked:.1%}" if asked else "-"
    text = f"hit rate  {rate} of {asked:,} tokens in {requests['count']:,} requests"
    lately = requests["lately"]
    if lately is not None:
        now = f"{lately['served'] / lately['asked']:.0%}" if lately["asked"] else "-"
        text += f"; last 10 s: {now}, {lately['served']:,.0f} tokens/s, {size(lately['read_bytes'])}/s from stores"
    elif before is not None:
        text += f"; since the last look {served - before['requests']['served_tokens']:,} tokens"
    if requests["seconds"]["p50"] is not None:
        text += f"; p50 {seconds(requests['seconds']['p50'])}, p99 {seconds(requests['seconds']['p99'])}"
    return text


def _saved(told: dict[str, Any]) -> str:
    saved = told["saved"]
    text = f"saved     {saved['tokens']:,} tokens of prefill"
    if saved["seconds"] is not None:
        digits = 0 if saved["seconds"] >= 10 else 2
        return f"{text}, {saved['seconds']:,.{digits}f} s at {saved['prefill_tokens_per_second']:,.0f} tokens/s"
    return f"{text} (with `prefill_tokens_per_second` in the block `live`: seconds, too)"


def _reasons(sums: dict[str, int], what: str) -> str:
    said = [f"{reason} {count:,}" for reason, count in sorted(sums.items(), key=lambda item: -item[1])[:5]]
    return f"{', '.join(said)} {what}" if said else "nothing"


def _full(tier: dict[str, Any]) -> str:
    capacity = tier["capacity"]
    return f"{tier['bytes'] / capacity:.0%}" if capacity else "-"


def size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 10 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e6:.0f} us" if value < 1e-3 else f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
