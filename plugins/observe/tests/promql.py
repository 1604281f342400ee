"""Enough of PromQL to say which metrics and labels a query is about."""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<string>\"[^\"]*\"|'[^']*')|(?P<range>\[[^\]]*\])|(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
    r"|(?P<word>[A-Za-z_:][A-Za-z0-9_:]*)|(?P<mark>=~|!~|!=|==|<=|>=|[-+*/%^(){},=<>])"
)
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_OPERATORS = {"and", "or", "unless", "bool", "offset"}


def tokens(text: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None, f"no PromQL: {text[at:]!r}"
        if match.lastgroup != "space":
            found.append((str(match.lastgroup), match[0]))
        at = match.end()
    return found


def names_and_labels(text: str) -> list[tuple[str, set[str]]]:
    """Each metric, with the labels that selectors and groupings name; a grouping counts for all of the query."""
    found: list[tuple[str, set[str]]] = []
    grouping: set[str] = set()
    words = tokens(text)
    at = 0
    while at < len(words):
        kind, word = words[at]
        following = words[at + 1][1] if at + 1 < len(words) else ""
        if kind == "word" and word in _GROUPING:
            at += 1
            if at < len(words) and words[at][1] == "(":
                while words[at][1] != ")":
                    at += 1
                    if words[at][0] == "word":
                        grouping.add(words[at][1])
        elif kind == "word" and word == "label_values":
            assert following == "("
            metric, label = words[at + 2][1], words[-2][1]
            return [(metric, {label})]
        elif kind == "word" and word not in _OPERATORS and following != "(" and following not in ("by", "without"):
            labels: set[str] = set()
            if following == "{":
                at += 1
                while words[at][1] != "}":
                    at += 1
                    if words[at][0] == "word":
                        labels.add(words[at][1])
            found.append((word, labels))
        at += 1
    return [(name, labels | grouping) for name, labels in found]
