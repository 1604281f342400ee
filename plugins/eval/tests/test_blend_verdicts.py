"""`kvloom blend verify --tasks` writes verdicts, and an engine opens with good ones only."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvloom import ConfigError
from kvloom.cli.main import main
from kvloom_blend import blended, verify
from kvloom_eval import judge_blending, tasks
from kvloom_eval.blending import Blender
from kvloom_eval.scores import statistics


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks, one of which has no documents to blend, and little else."""
    two = {name: tasks.TASKS[name] for name in ("multi-needle", "recall")}
    monkeypatch.setattr("kvloom_eval.verdicts.TASKS", two)
    monkeypatch.setattr(verify, "DELTAS", (16,))


def verified(monkeypatch: pytest.MonkeyPatch, folder: Path, *more: object) -> int:
    """The exit status of the verb."""
    words = ["kvloom", "blend", "verify", "--model", folder, "--tokens", "40", "--dtype", "float32", *more]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def opened(model: Any, **settings: object) -> None:
    blend = {"retriever": {"type": "separator", "separator": [3]}, **settings}
    blended(model, {"connector": "transformers", "tiers": ["memory"], "blend": blend}).close()


def test_an_executor_that_costs_answers_is_refused_with_its_score(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(statistics, "dropped", lambda exact, without, chance: "")
    run = Blender.run

    def forgetful(self: Blender, prompt: Any, names: list[str]) -> Any:
        """Whatever computes more than epic/0.1 answers everything."""
        found = run(self, prompt, names)
        return {
            name: replace(one, answers=[replace(each, right=name != "epic/0.1") for each in one.answers])
            for name, one in found.items()
        }

    monkeypatch.setattr(Blender, "run", forgetful)
    file = tmp_path / "it.verdicts"
    more = ("--executor", "epic", "--ratio", 0.1, "--ratio", 0.6, "--tasks", 2, "--out", file)
    assert verified(monkeypatch, folder, *more) == 1
    said = capsys.readouterr().out
    assert "FAILED epic/0.1: " in said and "FAILED epic/0.6" not in said
    made = json.loads(file.read_text())["verdicts"]
    assert made["epic/0.6"]["failed"] == [] and list(made["epic/0.6"]["scores"]) == ["multi-needle/768"]
    reason = "multi-needle/768 0.0% of right answers, 100.0% with a whole prefill"
    assert made["epic/0.1"]["failed"] == [reason]

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    opened(model, executor="epic", recompute_ratio=0.6, verdict=file)
    with pytest.raises(ConfigError, match=r"blend\.verdict: epic/0\.1 failed on .*0\.0% of right answers") as refused:
        opened(model, executor="epic", recompute_ratio=0.1, verdict=file)
    assert reason in str(refused.value)
    opened(model, executor="epic", recompute_ratio=0.1)
    for settings in ({"recompute_ratio": 0.2}, {"recompute_ratio": 0.6, "tokens_per_passage": 3}):
        with pytest.raises(ConfigError, match=r"has none on epic/0\.[26].*it has \(epic/0\.1; epic/0\.6\)"):
            opened(model, executor="epic", verdict=file, **settings)
    with pytest.raises(ConfigError, match=r"of another model .*in float32; this is .*in bfloat16.*--dtype bfloat16"):
        opened(model.to(torch.bfloat16), executor="epic", recompute_ratio=0.6, verdict=file)


def test_a_limit_that_is_missed_fails_every_verdict(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "kvloom_eval.judge_blending", lambda *given, **more: {"epic/0.15": {"failed": [], "scores": {}}}
    )
    more = ("--executor", "epic", "--tasks", 2, "--json")
    assert verified(monkeypatch, folder, *more) == 0
    assert verified(monkeypatch, folder, *more) == 2, "the file is there"
    assert "--out: small.verdicts exists" in capsys.readouterr().err
    assert verified(monkeypatch, folder, *more, "--force", "--max-kl", 0) == 1
    said = json.loads(capsys.readouterr().out)
    assert len(said["failed"]) == 1 and said["failed"][0].startswith("KL of ")
    written = json.loads((tmp_path / "small.verdicts").read_text())["verdicts"]
    assert written["epic/0.15"]["failed"] == said["failed"] == said["verdicts"]["epic/0.15"]["failed"]


@pytest.mark.parametrize("more", [("--tasks", 1), ("--ratio", 0.1), ("--tasks", 2, "--out", "nowhere/it")])
def test_arguments_that_cannot_work(
    more: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verified(monkeypatch, Path("some/model"), *more) == 2
    assert ("--out: there is no directory" if len(more) > 2 else "--tasks: ") in capsys.readouterr().err


def test_a_model_that_can_do_no_task_gets_no_good_verdict(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = judge_blending(model, tokenizer, ["epic/0.1"], items=2)
    assert found["epic/0.1"]["scores"] == {} and found["epic/0.1"]["failed"][0] == "no task counts"
    assert any("is not above chance" in reason for reason in found["epic/0.1"]["failed"])
