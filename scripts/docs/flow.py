"""The way of a request through the core, drawn from one that is watched: which part calls which, in order."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch

from kvloom import Engine, KVSpec

PARTS = {
    "Engine": ("kvloom.engine",),
    "token database": ("kvloom.builtin.chunked", "kvloom.keys"),
    "Transfer": ("kvloom.pipeline.transfer",),
    "connector": ("kvloom.builtin.plain",),
    "Stack": ("kvloom.pipeline.stack", "kvloom.pipeline.load", "kvloom.pipeline.store", "kvloom.pipeline.locate"),
    "memory tier": ("kvloom.tiers.memory.tier", "kvloom.tiers.memory.index", "kvloom.memory"),
    "": tuple(f"kvloom.tiers.{one}" for one in ("request_context", "invalidation", "tier", "chain", "index.lru")),
    "stored tier": ("kvloom.tiers",),
    "serializer": ("kvloom_serde", "kvloom.builtin.raw"),
    "envelope": ("kvloom.format.envelope",),
    "backend": ("kvloom_backend", "kvloom.builtin.dict_backend"),
}
"""Lanes of the drawing, from left to right, with their modules; the first that fits counts. Other modules, and calls
without a name here, are left out."""
SMALL = frozenset({
    "nbytes", "again", "release", "fidelity", "exact", "pages_of", "tensor", "view", "done", "max_encoded_bytes",
    "select", "abandon", "split", "check", "context", "flush",
})  # fmt: skip
"""Calls that a picture can do without."""
SPEC = KVSpec("drawn", num_layers=2, num_kv_heads=2, head_size=8, dtype="bfloat16")


class Call(NamedTuple):
    """One part calls another, for the first time in a request."""

    caller: str
    callee: str
    name: str
    aside: bool
    """On a thread of the tier's own: the caller of the verb does not wait for it by calling."""


def part_of(module: str) -> str | None:
    for part, prefixes in PARTS.items():
        if any(module == prefix or module.startswith((f"{prefix}.", f"{prefix}_")) for prefix in prefixes):
            return part or None
    return None


@contextmanager
def watched() -> Iterator[list[Call]]:
    """The calls between parts while this lasts, each once, in order."""
    calls: dict[Call, None] = {}
    stacks = threading.local()
    main = threading.current_thread()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        stack: list[str | None] = stacks.__dict__.setdefault("parts", [])
        if event == "return":
            if stack:
                stack.pop()
            return
        part = part_of(frame.f_globals.get("__name__", ""))
        caller = next((one for one in reversed(stack) if one), "caller" if threading.current_thread() is main else None)
        stack.append(part)
        name = frame.f_code.co_name
        if part and caller and part != caller and not name.startswith(("_", "<")) and name not in SMALL:
            calls.setdefault(Call(caller, part, name, threading.current_thread() is not main))

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        found: list[Call] = []
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        found += calls


def requests() -> dict[str, list[Call]]:
    """A store, and a retrieve of what is on disk only."""
    tokens, found = torch.arange(64), {}
    with tempfile.TemporaryDirectory() as folder:
        tiers = ["memory", {"type": "disk", "path": folder, "serializer": "cachegen"}]
        config = {"chunk_tokens": 32, "tiers": tiers}
        kv = torch.randn(SPEC.blob_shape(64)).to(SPEC.torch_dtype)

        def run(verb: str, do: Callable[[Engine], object]) -> None:
            with Engine.open(config, SPEC) as engine, watched() as calls:
                do(engine)
                engine.flush(30)
            found[verb] = calls

        run("store", lambda engine: engine.store(tokens, kv=kv))
        run("retrieve", lambda engine: engine.retrieve(tokens, kv=kv))
    return found


WIDE, HIGH, LEFT, TOP = 122, 26, 60, 46


def drawing(verb: str, calls: list[Call]) -> str:
    """An SVG: a line down for each part, an arrow for each call, one below the other; dashed beside the caller."""
    there = {part for call in calls for part in (call.caller, call.callee)}
    parts = [part for part in ("caller", *PARTS) if part in there]
    x = {part: LEFT + at * WIDE for at, part in enumerate(parts)}
    width, height = LEFT * 2 + (len(parts) - 1) * WIDE, TOP + (len(calls) + 1) * HIGH
    inside = [
        f"<title>What {verb} does</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#3b6ea5"/></marker></defs><rect width="100%" height="100%" fill="#fff"/>',
    ]
    for part, at in x.items():
        inside.append(f'<line x1="{at}" y1="{TOP}" x2="{at}" y2="{height - 8}" stroke="#c9d3de"/>')
        inside.append(
            f'<rect x="{at - 56}" y="10" width="112" height="28" rx="6" fill="#eef3f9" stroke="#3b6ea5"/>'
            f'<text x="{at}" y="29" {_TEXT} font-size="13">{part}</text>'
        )
    for number, call in enumerate(calls):
        y, begin, end = TOP + (number + 1) * HIGH, x[call.caller], x[call.callee]
        dash = ' stroke-dasharray="5 4"' if call.aside else ""
        inside.append(
            f'<line x1="{begin}" y1="{y}" x2="{end}" y2="{y}" stroke="#3b6ea5"{dash} marker-end="url(#tip)"/>'
            f'<text x="{(begin + end) / 2:.0f}" y="{y - 5}" {_TEXT} font-size="12">{call.name}</text>'
        )
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return f"{svg}{''.join(inside)}</svg>\n"


_TEXT = 'text-anchor="middle" font-family="sans-serif" fill="#1c2430"'
