"""`kvloom eval` from the command line, on a small random model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from kvloom import KVLoomError
from kvloom_eval import command, models, running
from kvloom_eval.command import evaluate
from kvloom_eval.scores import report, statistics
from kvloom_serde_cachegen import Profile


def call(*words: object) -> Result:
    app = typer.Typer()
    app.command()(evaluate)
    return CliRunner().invoke(app, list(map(str, words)))


def small(folder: Path, out: Path, *more: object) -> Result:
    return call(folder, "--plain", "--context", 600, "--items", 2, "--out", out, *more)


def refused(*words: object) -> str:
    result = call(*words)
    assert isinstance(result.exception, KVLoomError), result.output
    return str(result.exception)


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model counts as able to do the tasks, which a random one is not."""
    monkeypatch.setattr(statistics, "dropped", lambda exact, without, chance: "")


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drawn in one test: each takes a second."""
    draw_none(monkeypatch)


def draw_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "draw_codecs", lambda results, file: None)
    monkeypatch.setattr(report, "draw_blending", lambda results, file: None)


@pytest.mark.usefixtures("without_charts")
def test_what_a_model_cannot_do_is_left_out_with_the_reason(folder: Path, tmp_path: Path) -> None:
    result = small(folder, tmp_path, "--tasks", "key-value,recall", "--codec", "int8", "--json")
    made = json.loads(result.stdout)["codecs"]
    assert [each["name"] for each in made["tasks"]] == ["key-value/600", "recall/600"]
    page = (tmp_path / "results.md").read_text()
    for each in made["tasks"]:
        assert "is not above chance" in each["dropped"] or "is not below exact" in each["dropped"]
        assert f"no: {each['dropped']}" in page
    assert "int8" not in (tmp_path / "rows.jsonl").read_text(), "no time is spent on it"


@pytest.mark.usefixtures("able")
def test_codecs_and_executors_are_measured_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--tasks", "multi-needle,recall,text", "--codec", "int8,small", "--blend", "none,epic/0.2", "--json")
    result = small(folder, tmp_path, *words)
    assert result.exit_code == 0, result.exception or result.output
    made = json.loads(result.stdout)
    scores = {each["name"]: each for each in made["codecs"]["scores"]}
    assert set(scores) == {"exact", "int8", "small", "no context"}
    assert 8 < scores["int8"]["bits"] < 9 and scores["small"]["bits"] < 8
    assert 0 < scores["int8"]["text"]["kl"] < scores["small"]["text"]["kl"] < scores["no context"]["text"]["kl"]
    blended = {each["name"]: each for each in made["blending"]["scores"]}
    assert blended["none"]["share"] < blended["epic/0.2"]["share"] < blended["full prefill"]["share"] == 1
    assert [each["name"] for each in made["blending"]["tasks"]] == ["multi-needle/600"], "a conversation has no parts"
    assert set(scores["int8"]["tasks"]) == {"multi-needle/600", "recall/600"}
    assert set(blended["none"]["tasks"]) == {"multi-needle/600"} and blended["none"]["seconds"] > 0
    rows = (tmp_path / "rows.jsonl").read_bytes()
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("codecs.png", "blending.png"))
    draw_none(monkeypatch)
    again = small(folder, tmp_path, *words)
    assert again.exit_code == 0 and (tmp_path / "rows.jsonl").read_bytes() == rows
    assert json.loads(again.stdout) == made


@pytest.mark.usefixtures("able", "without_charts")
def test_an_interrupted_run_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--tasks", "needle,recall", "--codec", "int4")
    assert small(folder, tmp_path / "whole", *words).exit_code == 0
    calls = 0
    through = running.through_chunks

    def interrupted(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return through(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(running, "through_chunks", interrupted)
    stopped = small(folder, tmp_path / "parts", *words)
    assert stopped.exit_code == 130 and "the same command goes on" in stopped.output
    assert "| int4 |" in (tmp_path / "parts" / "results.md").read_text()
    assert small(folder, tmp_path / "parts", *words).exit_code == 0
    assert calls == 5, "two items were not measured again"
    whole, parts = ((tmp_path / each / "rows.jsonl").read_text() for each in ("whole", "parts"))
    assert sorted(whole.splitlines()) == sorted(parts.splitlines())


@pytest.mark.usefixtures("able", "without_charts")
def test_profiles_of_another_model_and_rows_with_another_profile_are_not_taken(folder: Path, tmp_path: Path) -> None:
    words = ("--tasks", "key-value,text", "--codec", "int8,default+profile", "--quick")
    assert small(folder, tmp_path, *words).exit_code == 0
    rows = (tmp_path / "rows.jsonl").read_bytes()
    assert small(folder, tmp_path, *words).exit_code == 0 and (tmp_path / "rows.jsonl").read_bytes() == rows
    made = Profile.load(tmp_path / "quick.kvprofile")
    theirs = tmp_path / "theirs" / "quick.kvprofile"
    theirs.parent.mkdir()
    replace(made, identity="Other, weights 1").save(theirs)
    said = str(small(folder, theirs.parent, *words).exception)
    assert said.startswith(f"{theirs} is of another model (Other, weights 1; this is {made.identity}); remove it")
    assert Profile.load(theirs).identity == "Other, weights 1", "nor is it replaced"
    replace(made, weights=made.weights.flip(1)).save(tmp_path / "another")
    found = small(folder, tmp_path, *words, "--profile", tmp_path / "another")
    assert isinstance(found.exception, KVLoomError)
    assert "rows of default+profile with another profile" in str(found.exception)
    assert small(folder, tmp_path, *words[:3], "int8", "--profile", tmp_path / "another").exit_code == 0
    assert (tmp_path / "rows.jsonl").read_bytes() == rows
    longer: dict[str, Any] = {
        "layers": made.layers + 1,
        "weights": torch.ones(made.planes, made.layers + 1, made.hidden),
    }
    replace(made, transform=None, **longer).save(tmp_path / "another")
    for file, why in (("another", "whose KV has"), ("missing", "cannot be read"), ("results.md", "not a profile")):
        found = small(folder, tmp_path, *words, "--profile", tmp_path / file)
        assert isinstance(found.exception, KVLoomError) and why in str(found.exception)


@pytest.mark.usefixtures("able", "without_charts")
def test_a_blended_item_that_was_cut_off_is_made_whole(folder: Path, tmp_path: Path) -> None:
    words = ("--tasks", "multi-needle", "--codec", "none", "--blend", "none,none", "--context", 600)
    assert small(folder, tmp_path, *words).exit_code == 0
    made = json.loads((tmp_path / "results.json").read_text())
    assert [each["name"] for each in made["blending"]["scores"]] == ["full prefill", "none", "no context, blend"]
    assert [each["name"] for each in made["blending"]["tasks"]] == ["multi-needle/600"]
    lines = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    for left in (1, 2):
        (tmp_path / "rows.jsonl").write_text("".join(lines[: left - 3]))
        assert small(folder, tmp_path, *words).exit_code == 0
        again = json.loads((tmp_path / "results.json").read_text())["blending"]
        assert [each["items"] for each in again["tasks"]] == [2]


@pytest.mark.usefixtures("without_charts")
def test_the_progress_bar_is_full_at_the_end(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, totals = [], []

    @contextmanager
    def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
        totals.append(total)
        yield lambda: calls.append(what)

    monkeypatch.setattr(command, "_progress", progress)
    monkeypatch.setattr(running, "SCREENED", 2)
    result = small(folder, tmp_path, "--tasks", "needle,text", "--codec", "int8", "--quick", "--items", 3)
    assert result.exit_code == 0 and totals == [len(calls)] == [3 + 2 + 2]


def test_mistakes_are_told_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "loaded", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    assert "--blend nope: no blend executor of type 'nope'" in refused("m", "--blend", "none,nope", "--out", tmp_path)
    assert "--blend epic/2: " in refused("m", "--blend", "epic/2", "--out", tmp_path)
    assert "--blend epic/x: could not convert" in refused("m", "--blend", "epic/x", "--out", tmp_path)
    for codecs in ("none", "default+profile"):  # it is looked at in the end, whether or not a codec needs it
        no_profile = refused("m", "--codec", codecs, "--out", tmp_path, "--profile", tmp_path / "nothing")
        assert "/nothing cannot be read (No such file" in no_profile
    codec = ("m", "--codec", "default+profile", "--out", tmp_path, "--profile")
    (tmp_path / "results.md").write_text("mine")
    assert "not a profile" in refused(*codec, tmp_path / "results.md")
    text = f"{tmp_path}/results.md exists and is not from `kvloom eval`; name another folder with --out"
    assert refused("m", "--codec", "int8", "--out", tmp_path) == text
    assert "cannot be written to" in refused("m", "--codec", "int8", "--out", tmp_path / "results.md")
    (tmp_path / "results.md").rename(tmp_path / "elsewhere")
    (tmp_path / "rows.jsonl").write_text('{"about": {"model": "m", "dtype": "float32", "seed": 3}}\n')
    assert "of another run: prompts was None" in refused("m", "--codec", "int8", "--out", tmp_path)
    (tmp_path / "results.json").mkdir()
    assert "results.json exists and cannot be written to" in refused("m", "--codec", "int8", "--out", tmp_path)
    (tmp_path / "results.json").rmdir()
    (tmp_path / "rows.jsonl").write_text("something else\n")
    assert "rows.jsonl is no file of rows" in refused("m", "--codec", "int8", "--out", tmp_path)
    (tmp_path / "rows.jsonl").unlink()
    os.mkfifo(tmp_path / "rows.jsonl")
    assert "rows.jsonl exists" in refused("m", "--codec", "int8", "--out", tmp_path)


def test_a_place_that_cannot_be_written_to_is_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    monkeypatch.setattr(models, "loaded", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    for place in (tmp_path, tmp_path / "new" / "newer"):
        with full_disk():
            said = refused("m", "--codec", "int8", "--out", place)
        assert said == f"{place} cannot be written to (File too large); name another folder with --out"
        assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("without_charts")
def test_what_cannot_be_measured_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "no chat template" in refused(folder, "--out", tmp_path)
    assert "the model takes 1,024; give at most 768" in refused(folder, "--plain", "--context", 900, "--out", tmp_path)
    assert "no task 'nedle'; there are text, needle" in refused(folder, "--tasks", "nedle")
    assert "no codec 'int3'; name a level (high, default, small)" in refused(folder, "--codec", "int3")
    assert "no codec 'step/9'" in refused(folder, "--codec", "step/9")
    assert "there is no directory" in refused(tmp_path / "nothing")
    few = refused(
        folder, "--plain", "--context", 200, "--tasks", "multi-document", "--codec", "int8", "--out", tmp_path
    )
    assert "the facts of multi-document take" in few and "give more" in few
    wrong = refused(folder, "--plain", "--context", 600, "--blend", "magic", "--out", tmp_path)
    assert "--blend magic" in wrong and "epic" in wrong
    assert small(folder, tmp_path / "one", "--tasks", "text", "--codec", "int8").exit_code == 0
    other = refused(folder, "--plain", "--context", 600, "--seed", 1, "--codec", "int8", "--out", tmp_path / "one")
    assert "seed was 0 and is 1" in other
