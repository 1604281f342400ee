"""Reasons of events as a bounded set of words: what an error says in full may be new each time."""

from __future__ import annotations

import re

_WORDS = {
    "missed": (
        "in no tier",
        "behind a miss",
        "no answer",
        "given up",
        "part-way",
        "expired",
        "corrupt",
        "unreadable",
        "no room in memory",
        "device failed",
    ),
    "evicted": ("capacity", "quota", "expired", "removed"),
    "tier_paused": ("reading", "writing"),
    "tier_resumed": ("reading", "writing"),
    "blended": ("reused", "computed"),
}
_PLAIN = re.compile(r"[A-Za-z_]+(: [A-Za-z_]+)?$")
_MOST_CHARS = 64


def bounded(name: str, reason: str) -> str:
    """reason: of an event of that name. What varies with keys, sizes or messages is cut off or becomes `other`."""
    if not reason:
        return ""
    known = next((word for word in _WORDS.get(name, ()) if reason.startswith(word)), None)
    if known is not None:
        return known
    if name in _WORDS or name == "corrupt":
        return "other" if name != "corrupt" else ""
    if name == "tier_error" or name == "observer_error":  # a verb and the type of an error; an observer's type
        return reason if _PLAIN.match(reason) and len(reason) <= _MOST_CHARS else "other"
    return reason.partition(":")[0][:_MOST_CHARS]
