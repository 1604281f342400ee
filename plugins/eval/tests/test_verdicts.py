"""Task scores for verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvloom import KVLoomError
from kvloom_eval import judge, steps
from kvloom_eval.codecs import parsed
from kvloom_eval.scores import statistics
from kvloom_eval.tasks import TASKS


def test_scores_are_of_each_codec_and_task_that_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    codecs = {"int8": lambda kv, start: (kv, 1), "zero": lambda kv, start: (torch.zeros_like(kv), 1)}
    calls = []
    monkeypatch.setattr(statistics, "dropped", lambda exact, without, chance: "" if len(exact) == 2 else "few")

    found = judge(model, tokenizer, codecs, items=2, step=lambda: calls.append(1))

    assert len(calls) == steps(2) == 4 * len(TASKS)
    assert set(found) == {"int8", "zero"} and set(found["int8"]) == {f"{task}/768" for task in TASKS}
    for same in found["int8"].values():
        assert same["codec"] == same["exact"] and same["low"] == same["high"] == 0.0
    assert any(each["codec"] != each["exact"] for each in found["zero"].values())


def test_a_model_of_few_tokens_is_refused(short: Any) -> None:
    with pytest.raises(KVLoomError, match="takes contexts of 44 tokens; tasks need 512"):
        judge(short, None, {}, items=2)


def test_tasks_that_say_nothing_are_left_out(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert judge(model, tokenizer, {"int8": parsed("lossless").make(None, None)}, items=2) == {"int8": {}}
