"""`kvloom blend demo`: what it measures, what it draws, and what it claims."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blend_models import model
from blend_texts import TEXTS, Letters

from kvloom import BlendExecutor, BlendRequest, ConfigError, EngineConfig
from kvloom_blend.commands import demo
from kvloom_blend.demo import measure, report
from kvloom_blend.demo.random_choice import RandomExecutor
from kvloom_blend.quality import Agreement
from kvloom_testkit import ExecutorConformance
from kvloom_testkit.subjects import SPEC

torch.set_num_threads(1)


class TestRandom(ExecutorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], BlendExecutor]:
        return lambda: RandomExecutor(RandomExecutor.Config(), SPEC)


def test_random_draws_the_share_that_it_is_told_to() -> None:
    request = BlendRequest(torch.arange(200), torch.tensor([0, 200]), torch.arange(200) < 190)
    drawn = []
    for seed in (0, 0, 1):
        executor = RandomExecutor(RandomExecutor.Config(recompute_ratio=0.3, seed=seed), SPEC)
        plan = executor.begin(request).plan()
        assert plan is not None and int(plan.sum()) == 57 + 10
        drawn.append(plan.tolist())
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[measure.Result, Path]:
    out = tmp_path_factory.mktemp("demo")
    texts = [text * 2 for text in TEXTS]
    return measure.measure(model(), Letters(), texts, ["why?", "when?"], most_tokens=80, orders=3, out=out), out


def test_every_executor_is_measured_at_every_ratio(measured: tuple[measure.Result, Path]) -> None:
    result, out = measured
    found = [(row.executor, row.ratio) for row in result.rows]
    assert found == [
        ("none", 0.0), *((word, ratio) for word in measure.EXECUTORS for ratio in measure.RATIOS), ("full", 1.0),
    ]  # fmt: skip
    assert {"cacheblend", "random"} <= set(measure.EXECUTORS) and len(measure.EXECUTORS) == 5
    by = {(row.executor, row.ratio): row for row in result.rows}
    assert by["full", 1.0].agreement == Agreement(pytest.approx(0, abs=1e-9), 1.0)
    assert by["none", 0.0].agreement.kl > 1e-6
    for word in measure.EXECUTORS:
        shares = [by[word, ratio].computed_share for ratio in measure.RATIOS]
        assert shares == sorted(shares) and by["none", 0.0].computed_share < shares[0] < shares[-1] < 1
    assert result.document_tokens == (80,) * 4 and result.prompts == 3
    assert result.all_found and result.off <= result.limit
    assert result.example is not None and result.example.question == "why?"
    assert result.example.whole and result.example.blended
    assert json.loads((out / "blend.json").read_text())["rows"][0]["executor"] == "none"
    config = EngineConfig.load(out / "blend.yaml")
    assert config.blend is not None and config.blend.executor == "cacheblend"


def test_orders_differ_and_questions_take_turns() -> None:
    documents = [torch.tensor([number]) for number in range(6)]
    asked = measure._asked(documents, ["a", "b"], 4)
    assert [question for _, question in asked] == ["a", "b", "a", "b"]
    orders = [[int(one) for one in order] for order, _ in asked]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (TEXTS[:1], "at least two documents"),
        ([*TEXTS, f"here{measure.SEPARATOR}there"], "none may contain"),
        ([text * 40 for text in TEXTS], "the model allows 4,096"),
    ],
)
def test_texts_that_do_not_fit(texts: list[str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        measure.measure(model(), Letters(), texts, ["why?"], most_tokens=4000, orders=1, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_document_that_is_not_found_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember = measure.BlendedModel.remember
    kept: list[int] = []

    def all_but_one(self: Any, tokens: torch.Tensor, **more: Any) -> int:
        kept.append(len(kept))
        return remember(self, tokens, **more) if len(kept) > 1 else 0

    monkeypatch.setattr(measure.BlendedModel, "remember", all_but_one)
    monkeypatch.setattr(measure, "RATIOS", (0.15,))
    result = measure.measure(
        model(), Letters(), [text * 2 for text in TEXTS], ["why?"], most_tokens=80, orders=1, out=tmp_path
    )
    assert not result.all_found


RESULT = measure.Result(
    prompts=4, prompt_tokens=900, document_tokens=(400, 400), seconds=1.0,
    rows=(
        measure.Row("none", 0.0, 0.1, Agreement(1e-1, 0.5), 0.1),
        measure.Row("cacheblend", 0.15, 0.25, Agreement(1e-3, 0.9), 0.3),
        measure.Row("cacheblend", 0.5, 0.5, Agreement(1e-5, 1.0), 0.6),
        measure.Row("random", 0.15, 0.25, Agreement(1e-2, 0.8), 0.3),
        measure.Row("random", 0.5, 0.5, Agreement(1e-3, 0.9), 0.6),
        measure.Row("full", 1.0, 1.0, Agreement(0.0, 1.0), 0.9),
    ),
    all_found=True, off=1e-5, limit=1e-4, example=measure.Example("Why?", " It is\n so.", " It may be so."),
)  # fmt: skip


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    report.print_results("it", RESULT)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[2:6] == ["", "... Why?", "whole prefill It is so.", "cacheblend, 15 % It may be so."]
    assert "whole prefill - 1000 1.0x - -" in lines
    assert "cacheblend 15% 250 4.0x 0.001 90.0%" in lines
    assert "full 100% 1000 1.0x 0 100.0%" in lines


def test_claims_are_checked() -> None:
    assert [holds for holds, _ in report.checks(RESULT)] == [True, True]
    assert [holds for holds, _ in report.checks(replace(RESULT, all_found=False))] == [False, True]
    assert [holds for holds, _ in report.checks(replace(RESULT, off=2e-4))] == [True, False]


def test_curves_begin_where_nothing_is_computed_again() -> None:
    assert report.curves(RESULT) == {
        "cacheblend": [(0.0, 1e-1), (0.15, 1e-3), (0.5, 1e-5)],
        "random": [(0.0, 1e-1), (0.15, 1e-2), (0.5, 1e-3)],
    }


def test_sparklines_share_a_scale() -> None:
    first, *lines = report.sparklines(RESULT).splitlines()
    assert first == "KL at 0% 15% 50%, from 1e-05 to 0.1"
    assert [line.split() for line in lines] == [["cacheblend", "█▅▁"], ["random", "█▆▅"]]


def test_without_matplotlib_there_are_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("kvloom_blend.loading.loaded", lambda name, dtype: (None, None))
    monkeypatch.setattr(measure, "measure", lambda *args, **more: RESULT)
    demo(model="it", documents=None, question=None, tokens=16, orders=1, out=tmp_path)
    said = capsys.readouterr().out
    assert "█▅▁" in said and "pip install matplotlib" in said and "\nchart:" not in said
    assert not (tmp_path / "blend.png").exists()


@pytest.mark.parametrize("what", ["fifo", "hole", "link"])
def test_special_files_are_neither_waited_for_nor_read(tmp_path: Path, what: str) -> None:
    place = tmp_path / "blend.yaml"
    if what == "fifo":
        os.mkfifo(place)
    elif what == "link":
        place.symlink_to("nothing")
    else:
        place.write_text(measure._FIRST_LINE)
        os.truncate(place, 1 << 43)
    with pytest.raises(ValueError, match="is not from a demo"):
        measure.check_own(tmp_path)


def test_a_configuration_that_no_demo_made_is_not_written_over(tmp_path: Path, measured: tuple[object, Path]) -> None:
    measure.check_own(measured[1])
    mine = tmp_path / "blend.yaml"
    mine.write_text("connector: vllm\n")
    with pytest.raises(ConfigError, match=r"--out: .*blend\.yaml exists and is not from a demo"):
        demo(model="it", documents=None, question=None, tokens=16, orders=1, out=tmp_path)


def test_documents_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"--documents: .*a\.bin is not a text in UTF-8"):
        demo(model="it", documents=tmp_path / "a.bin", question=None, tokens=16, orders=1, out=tmp_path)
