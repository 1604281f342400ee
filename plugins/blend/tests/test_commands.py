"""`kvloom blend`: what is printed, and how it exits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from blend_models import CONFIGS
from blend_texts import TEXTS
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from kvloom.cli.main import main
from kvloom_blend import loading, verify
from kvloom_blend.demo import measure, report
from kvloom_blend.loading import default_model

torch.set_num_threads(1)
WEIGHTS = Path(__file__).parents[3] / "evals" / "pylm" / "weights"


def saved(config: Any, folder: Path) -> str:
    """A model of random weights, with the tokenizer of pylm."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in WEIGHTS.glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = CONFIGS["llama"].to_dict() | {"vocab_size": 4096}
    return saved(LlamaConfig(**config), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def documents(tmp_path: Path) -> str:
    file = tmp_path / "documents.txt"
    file.write_text("\n\n".join(text * 3 for text in TEXTS), encoding="utf-8")
    return str(file)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status."""
    monkeypatch.setattr(sys, "argv", ["kvloom", "blend", *arguments])
    monkeypatch.setenv("COLUMNS", "120")
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_verify(
    llama: str, documents: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verify", "--model", llama, "--prompts", documents, "--tokens", "40"]
    assert run(monkeypatch, *arguments) == 0
    said = capsys.readouterr().out
    for what in ("float32", "bfloat16", "rotation by 131,071", "garbage", "true KV", "top-1", "30%", "can be blended"):
        assert what in said
    assert "FAILED" not in said


def test_verify_fails_where_a_limit_is_missed(
    llama: str, documents: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(verify.LOGITS, torch.float32, -1.0)
    arguments = ["verify", "--model", llama, "--prompts", documents, "--tokens", "40", "--dtype", "float32"]
    assert run(monkeypatch, *arguments, "--max-kl", "0") == 1
    said = capsys.readouterr().out
    assert said.count("FAILED float32: ") == 4 and "can be blended" not in said and "bfloat16" not in said
    assert "FAILED KL of" in said and "at 15%, at most 0" in said


def test_verify_prints_json(
    llama: str, documents: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(verify.LOGITS, torch.float32, -1.0)
    arguments = ["verify", "--model", llama, "--prompts", documents, "--tokens", "40", "--dtype", "float32", "--json"]
    assert run(monkeypatch, *arguments) == 1
    said = json.loads(capsys.readouterr().out)
    assert len(said["failed"]) == 4 and all(one.startswith("float32: ") for one in said["failed"])
    assert sorted(one["what"] for one in said["findings"]["float32"] if not one["holds"]) == sorted(
        one.removeprefix("float32: ") for one in said["failed"]
    )
    assert [one["ratio"] for one in said["ratios"]] == list(verify.RATIOS)


def test_a_model_that_cannot_be_moved_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = saved(GPT2Config(vocab_size=4096, n_embd=32, n_layer=2, n_head=2), tmp_path / "gpt2")
    assert run(monkeypatch, "verify", "--model", name) == 2
    captured = capsys.readouterr()
    assert "learned positions" in captured.err and captured.err.strip().count("\n") == 0
    assert captured.out == ""


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--executor", "nobody"], "nobody"),
        (["--executor", "none"], "recompute_ratio"),
        (["--prompts", "one.txt"], "1 documents are too few"),
    ],
)
def test_arguments_that_cannot_work(
    llama: str, more: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("a document\nand no other\n")
    assert run(monkeypatch, "verify", "--model", llama, "--dtype", "float32", *more) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    [
        ["--executor", "nobody"], ["--executor", "none"], ["--prompts", "no text"], ["--prompts", "one.txt"],
        ["--out", "folder", "--force", "--tasks", "2"], ["--out", "/proc/new", "--tasks", "2"],
    ],
)  # fmt: skip
def test_no_model_is_loaded_for_arguments_that_cannot_work(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "loaded", None)
    Path("no text").write_bytes(b"\xff")
    Path("one.txt").write_text("a document\nand no other\n")
    Path("folder").mkdir()
    assert run(monkeypatch, "verify", "--model", "some/model", *more) == 2
    assert more[0] in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--out", "one.txt"], ["--documents", "one.txt"]])
def test_the_demo_loads_no_model_for_arguments_that_cannot_work(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "loaded", None)
    Path("one.txt").write_text("a document\nand no other\n")
    assert run(monkeypatch, "demo", "--model", "some/model", *more) == 2
    assert more[0] in capsys.readouterr().err


def test_the_demo_loads_no_model_where_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    full_disk: Callable[[], AbstractContextManager[None]],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "loaded", None)
    with full_disk():
        assert run(monkeypatch, "demo", "--model", "some/model", "--out", "new/newer") == 2
    assert "--out: new/newer cannot be written to (File too large)" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("verb", [["verify", "--model", "./nowhere"], ["demo", "--model", "./nowhere"]])
def test_a_model_that_is_not_there(
    verb: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *verb) == 2
    assert "there is no directory './nowhere'" in capsys.readouterr().err


def test_the_demo_needs_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "demo") == 2
    assert "--model: evals/pylm is not in this folder nor above it" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    monkeypatch.chdir(WEIGHTS.parent)
    assert default_model() == str(WEIGHTS)


def test_the_demo_end_to_end(
    llama: str, documents: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    arguments = ["demo", "--model", llama, "--documents", documents, "--tokens", "90", "--orders", "2"]
    assert run(monkeypatch, *arguments, "--question", "What of A?", "--out", str(out)) == 0
    said = capsys.readouterr().out
    for what in ("whole prefill", "cacheblend", "hybrid", "question_attention", "epic", "random", "none", "full"):
        assert what in said
    assert said.count("ok     ") == 2 and "FAILED" not in said
    assert f"chart: {out / 'blend.png'}" in said
    assert (out / "blend.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "blend.json").is_file() and (out / "blend.yaml").is_file()


def test_the_demo_prints_json(
    llama: str, documents: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = measure.Result(1, 10, (5, 5), 0.1, (), True, 0.0, 1e-3)
    monkeypatch.setattr(measure, "measure", lambda *arguments, **more: result)
    monkeypatch.setattr(report, "draw_chart", lambda result, file: None)
    arguments = ["demo", "--model", llama, "--documents", documents, "--out", str(tmp_path / "out"), "--json"]
    assert run(monkeypatch, *arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["model"], said["prompt_tokens"]) == (llama, 10)
    assert [one["holds"] for one in said["checks"]] == [True, True]


def test_the_verbs_are_light() -> None:
    script = "import sys, kvloom_blend.commands; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "False"]
