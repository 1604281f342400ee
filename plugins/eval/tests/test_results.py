"""Scores from rows: of items that all were measured with, and in pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom_eval.scores import report, results
from kvloom_eval.scores.rows import Rows


def row(item: int, by: str, right: list[int], **more: float) -> dict[str, object]:
    return {
        "item": f"recall/512/{item}", "by": by, "right": right, "exact": right,
        "probability": [float(each) for each in right],
        "nll": [0.5] * len(right), "kl": [0.25] * len(right), **more,
    }  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    made = Rows(tmp_path / "rows.jsonl", {"seed": 0})
    for item in range(10):
        made.add([
            row(item, "exact", [1, 1], chance=0.25, tokens=500), row(item, "no context", [0, 0]),
            row(item, "good", [1, 1], bits=8.0), row(item, "bad", [1, 0] if item else [1, 1], bits=2.0),
        ])  # fmt: skip
    made.add([row(10, "exact", [0, 0], chance=0.25), row(10, "no context", [0, 0]), row(10, "good", [0, 0], bits=8.0)])
    return made


def test_a_codec_is_worse_if_it_loses_more_than_its_interval(rows: Rows) -> None:
    found = results.of_codecs(rows, ["recall/512"], ["good", "bad"])
    scores = {each.name: each for each in found.scores}
    assert found.kept == ["recall/512"] and scores["good"].worse == [] and scores["bad"].worse == ["recall/512"]
    assert scores["bad"].loss is not None and scores["bad"].loss.mean == pytest.approx(-0.45)
    assert scores["bad"].mean is not None and scores["bad"].mean.mean == pytest.approx(0.55)
    assert scores["bad"].bits == 2.0 and scores["bad"].answer_kl == 0.25


def test_an_item_that_was_not_finished_does_not_count(rows: Rows) -> None:
    (task,) = results.of_codecs(rows, ["recall/512"], ["good", "bad"]).tasks
    assert (task.items, task.questions, task.exact.mean, task.tokens) == (10, 20, 1.0, 500)
    (task,) = results.of_codecs(rows, ["recall/512"], ["good"]).tasks
    assert task.items == 11 and task.exact.mean < 1
    (task,) = results.of_codecs(rows, ["recall/512"], ["good", "not yet"]).tasks
    assert task.items == 11, "what has no row at all is left out, and not all items"


def test_the_page_has_a_row_for_each(rows: Rows, tmp_path: Path) -> None:
    found = results.of_codecs(rows, ["recall/512"], ["good", "bad"])
    page = report.page({"model": "small"}, found, None, 1234)
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith(("| good", "| bad", "| exact"))]
    assert [line[0] for line in lines] == ["| exact", "| good", "| bad"]
    assert lines[2][1:4] == ["2.00", "8.00", "55.0"] and lines[2][-1] == "recall/512 |"
    assert "The profile has 1,234 bytes" in page
    report.draw_codecs(found, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000


@pytest.mark.parametrize("executors", [["none"], ["none", "epic/0.1"]], ids=str)
def test_a_chart_of_executors_begins_at_zero_and_has_each(
    executors: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    made = Rows(tmp_path / "rows.jsonl", {})
    for item in range(4):
        made.add([
            row(item, "no context, blend", [0, 0]),
            row(item, "full prefill", [1, 1], chance=0.25, tokens=500, share=1.0),
            *(row(item, each, [1, 0], share=0.2) for each in executors),
        ])  # fmt: skip
    drawn = []
    monkeypatch.setattr(figure, "savefig", lambda self, *_, **__: drawn.append(self))
    found = results.of_blending(made, ["recall/512"], ["full prefill", *executors])
    report.draw_blending(found, tmp_path / "chart.png")
    (axes,) = drawn[0].axes
    assert axes.get_xlim()[0] == 0
    names = [each.get_label() for each in axes.lines]
    assert (executors[-1].partition("/")[0]) in names
    assert "| no context |" in "\n".join(report.blend_table(found))
