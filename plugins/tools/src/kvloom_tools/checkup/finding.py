"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """note: worth knowing, and not in the way. problem: something will not work, and `text` says what to do."""

    topic: str
    subject: str
    verdict: Verdict
    text: str


def ok(topic: str, subject: str, text: str = "") -> Finding:
    return Finding(topic, subject, "ok", text)


def note(topic: str, subject: str, text: str) -> Finding:
    return Finding(topic, subject, "note", text)


def problem(topic: str, subject: str, text: str) -> Finding:
    return Finding(topic, subject, "problem", text)
