"""Rows of items as results: which tasks count, and the scores of every codec and executor with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvloom_eval.scores import statistics
from kvloom_eval.scores.rows import EXACT, FULL, TEXT, WITHOUT, Row, Rows
from kvloom_eval.scores.statistics import Mean

Table = Mapping[str, Mapping[str, Row]]
"""Rows of a task by codec or executor, then by item."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task in one context length, as the model does it with exact KV."""

    name: str
    items: int
    questions: int
    tokens: int
    """Of the longest context."""
    chance: float
    exact: Mean
    """Share of questions whose right choice is the likeliest."""
    exact_match: float
    """Share of questions that greedy decoding answers right, with exact KV."""
    without: Mean
    dropped: str
    """The reason why the task does not count; empty if it does."""


@dataclass(frozen=True, slots=True)
class Scores:
    """One codec or executor."""

    name: str
    tasks: dict[str, Mean] = field(default_factory=dict)
    losses: dict[str, Mean] = field(default_factory=dict)
    """By task: the difference to exact KV on the same items."""
    exact_match: dict[str, float] = field(default_factory=dict)
    mean: Mean | None = None
    """Over the tasks that count; None if none does."""
    loss: Mean | None = None
    probability_loss: Mean | None = None
    """The difference in the right choice's share of the likelihood of all choices, which moves before choices do."""
    bits: float | None = None
    text: dict[str, float] = field(default_factory=dict)
    """`kl`, `top1`, `dnll` and `perplexity` of real text."""
    answer_kl: float | None = None
    """Divergence at the tokens of the right choices, over the tasks that count."""
    share: float | None = None
    """Of executors: rows computed, as a share of those of a prefill."""
    seconds: float | None = None

    @property
    def worse(self) -> list[str]:
        """The tasks whose score is below exact by more than its interval."""
        return [name for name, each in self.losses.items() if each.high < 0]


@dataclass(frozen=True, slots=True)
class Results:
    tasks: list[Task]
    scores: list[Scores]

    @property
    def kept(self) -> list[str]:
        return [each.name for each in self.tasks if not each.dropped]


def of_codecs(rows: Rows, tasks: Sequence[str], codecs: Sequence[str]) -> Results:
    """tasks: with their contexts, `needle/1024`. Of a task, only items count that all have a row of which have any."""
    return _results(rows, tasks, [EXACT, *codecs, WITHOUT], EXACT, WITHOUT)


def of_blending(rows: Rows, tasks: Sequence[str], executors: Sequence[str]) -> Results:
    """The same, for executors beside a whole prefill."""
    without = f"{WITHOUT}, blend"
    return _results(rows, tasks, [*executors, without], FULL, without)


def as_json(results: Results) -> dict[str, Any]:
    scores = [{**asdict(each), "worse": each.worse} for each in results.scores]
    return {"tasks": [asdict(each) for each in results.tasks], "scores": scores}


# -- inside ------------------------------------------------------------------------------------------------------------


def _results(rows: Rows, tasks: Sequence[str], names: Sequence[str], exact: str, without: str) -> Results:
    table = {task: _common(rows, task, names) for task in tasks}
    judged = [_task(each, table[each], exact, without) for each in tasks if each.partition("/")[0] != TEXT]
    found = [each for each in judged if each is not None]
    kept = [each.name for each in found if not each.dropped]
    texts = [each for each in tasks if each.partition("/")[0] == TEXT]
    return Results(found, [_scores(table, each, kept, texts, exact) for each in names])


def _common(rows: Rows, task: str, names: Sequence[str]) -> Table:
    """The rows of a task, of items that were measured by all: an interrupted run has some that were not."""
    found = {by: dict(rows.of(by, task)) for by in names}
    measured = [set(each) for each in found.values() if each]
    items = set.intersection(*measured) if measured else set()
    return {by: {item: row for item, row in each.items() if item in items} for by, each in found.items()}


def _task(name: str, table: Table, exact: str, without: str) -> Task | None:
    with_it, alone = table[exact], table[without]
    both = [each for each in with_it if each in alone]
    if not both:
        return None
    ours, theirs = ([_share(some[each], "right") for each in both] for some in (with_it, alone))
    chance = sum(with_it[each]["chance"] for each in both) / len(both)
    return Task(
        name=name,
        items=len(both),
        questions=sum(len(with_it[each]["right"]) for each in both),
        tokens=max(with_it[each].get("tokens", 0) for each in both),
        chance=chance,
        exact=statistics.mean(ours),
        exact_match=_mean([_share(with_it[each], "exact") for each in both]),
        without=statistics.mean(theirs),
        dropped=statistics.dropped(ours, theirs, chance),
    )


def _scores(tables: Mapping[str, Table], by: str, kept: Sequence[str], texts: Sequence[str], exact: str) -> Scores:
    right: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    likelier: dict[str, list[float]] = {}
    matches: dict[str, float] = {}
    every: list[Row] = []
    for task in kept:
        reference, ours = tables[task][exact], tables[task][by]
        both = list(ours)
        if not both:
            continue
        every += [ours[each] for each in both]
        right[task] = [_share(ours[each], "right") for each in both]
        losses[task] = statistics.differences(right[task], [_share(reference[each], "right") for each in both])
        likelier[task] = [_share(ours[each], "probability") - _share(reference[each], "probability") for each in both]
        matches[task] = _mean([_share(ours[each], "exact") for each in both])
    predicted = [(ours, tables[task][exact][item]) for task in texts for item, ours in tables[task][by].items()]
    every += [ours for ours, _ in predicted]
    return Scores(
        name=by,
        tasks={task: statistics.mean(each) for task, each in right.items()},
        losses={task: statistics.mean(each) for task, each in losses.items()},
        exact_match=matches,
        mean=statistics.stratified(right) if right else None,
        loss=statistics.stratified(losses) if losses else None,
        probability_loss=statistics.stratified(likelier) if likelier else None,
        bits=_figure(every, "bits"),
        text=_text(predicted),
        answer_kl=_figure([row for row in every if "right" in row], "kl"),
        share=_figure(every, "share"),
        seconds=_figure(every, "seconds"),
    )


def _text(predicted: Sequence[tuple[Row, Row]]) -> dict[str, float]:
    if not predicted:
        return {}
    nll, reference = (_mean([pair[which]["nll"] for pair in predicted]) for which in (0, 1))
    return {
        "kl": _mean([ours["kl"] for ours, _ in predicted]),
        "top1": _mean([ours["same"] for ours, _ in predicted]),
        "dnll": nll - reference,
        "perplexity": 2.718281828459045 ** min(nll, 700),  # beyond, it is no float
        "windows": len(predicted),
    }


def _figure(rows: Sequence[Row], name: str) -> float | None:
    found = [_share(row, name) if isinstance(row[name], list) else row[name] for row in rows if name in row]
    return _mean(found) if found else None


def _share(row: Row, name: str) -> float:
    return _mean(row[name])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
