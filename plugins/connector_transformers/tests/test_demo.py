"""`kvloom demo`: two processes, an honest verdict, and errors that say what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Self

import pytest
import torch
import typer
from typer.testing import CliRunner

from kvloom import ConfigError
from kvloom_connector_transformers.demo import command, worker
from kvloom_connector_transformers.demo.job import Job, llama_shape, parameters
from kvloom_connector_transformers.demo.report import checks, draw_chart, parts

STORED = {
    "load_seconds": 1.0,
    "document_tokens": 600,
    "already_stored": 0,
    "stored": 512,
    "compute_seconds": 1.0,
    "store_seconds": 0.1,
    "kv_bytes": 10 * 2**20,
    "kept_bytes": 2 * 2**20,
    "note": "",
    "parameters": 1_000_000,
    "model": "llama",
}
ANSWERED: dict[str, Any] = {
    "load_seconds": 1.0,
    "prompt_tokens": 610,
    "cold_seconds": 1.0,
    "warm_seconds": 0.25,
    "report": {
        "hit_tokens": 512,
        "by_tier": {"disk": 512},
        "lookup_seconds": 0.01,
        "load_seconds": 0.05,
        "compute_seconds": 0.15,
    },
    "bytes": 2**20,
    "exact": True,
    "cold_difference": 0.003,
    "split_difference": 0.001,
    "resolution": 1e-6,
    "same_token": True,
    "text": " is a test.",
    "codec": "",
    "same_text": True,
    "threads": 2,
    "dtype": "float32",
}


@pytest.fixture
def app() -> typer.Typer:
    commands = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    commands.command("demo")(command.demo)
    return commands


def canned(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    answers = {"store": STORED, "answer": ANSWERED | changes}
    monkeypatch.setattr(command, "_process", lambda console, role, job, out: answers[role])


@pytest.mark.parametrize(
    "forked", [("store", "answer"), pytest.param(("store",), marks=pytest.mark.slow)], ids="+".join
)
def test_two_processes_end_to_end(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forked: tuple[str, ...]
) -> None:
    """A fork has nothing of what its sibling, the first process, has loaded; one that is none has nothing of ours."""
    pytest.importorskip("kvloom_backend_disk", reason="the disk tier is not installed")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    real = subprocess.Popen
    monkeypatch.setattr(
        command.subprocess, "Popen", lambda args, **more: (Forked if set(forked) & set(args) else real)(args, **more)
    )
    out = tmp_path / "out"
    document = tmp_path / "document.txt"
    document.write_text("What is prefilled once need not be prefilled twice. " * 20, encoding="utf-8")
    arguments = ["--size", "1M", "--document", str(document), "--tokens", "600", "--out", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "process 1  prefilled" in done.output and "592 from disk" in done.output
    assert done.output.count("ok     ") == 3 and "FAILED" not in done.output
    answered = json.loads((out / "result.json").read_text())["answered"]
    assert answered["exact"] and answered["report"]["hit_tokens"] == 592
    assert answered["bytes"] == 592 * 2 * 8 * 64 * 4
    assert (out / "laptop.yaml").is_file() and not (out / "kv").exists()
    assert (out / "ttft.png").read_bytes().startswith(b"\x89PNG")


class Forked:
    """`subprocess.Popen` of one of the demo's processes, which need not import transformers anew."""

    def __init__(self, command: list[str], *, stderr: IO[str], **others: Any) -> None:
        read, write = os.pipe()
        self._process = os.fork()
        if not self._process:
            self._become(command[command.index("-m") + 1 :], write, stderr)
        os.close(write)
        self.stdout = os.fdopen(read)

    def _become(self, arguments: list[str], out: int, stderr: IO[str]) -> None:
        code: Any = 1
        try:
            os.dup2(stderr.fileno(), 2)
            sys.argv, sys.stdout, sys.stderr = arguments, os.fdopen(out, "w"), stderr
            torch.set_num_threads(1)  # a fork has no other ones
            worker.main()
            code = 0
        except SystemExit as end:
            code = end.code
        finally:
            sys.stdout.flush()
            os._exit(code)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stdout.close()
        os.waitpid(self._process, 0)


def test_json_is_all_that_is_on_stdout(app: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    canned(monkeypatch)
    done = CliRunner().invoke(app, ["--size", "small", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said == json.loads((tmp_path / "result.json").read_text())
    assert said["answered"]["report"]["hit_tokens"] == 512 and [one["holds"] for one in said["checks"]] == [True] * 3


def test_it_passes_when_all_holds(app: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    canned(monkeypatch)
    done = CliRunner().invoke(app, ["--size", "small", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "is a test." in done.output and "512 from disk" in done.output
    assert "10.0 MiB, kept in 2.0 MiB, 5.0 times smaller" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"exact": False}, "bit for bit"),
        ({"exact": False, "codec": "cachegen", "same_text": False}, "cachegen rounds the KV"),
        ({"cold_difference": 0.0041}, "of the cold run"),
        ({"report": ANSWERED["report"] | {"hit_tokens": 0}}, "the second process found 0 tokens"),
    ],
)
def test_it_fails_when_a_claim_does_not_hold(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], claim: str
) -> None:
    canned(monkeypatch, **changes)
    done = CliRunner().invoke(app, ["--size", "small", "--out", str(tmp_path)])
    assert done.exit_code == 1
    (failed,) = [verdict.text for verdict in checks(ANSWERED | changes) if not verdict.holds]
    assert claim in failed and "FAILED" in done.output


def test_a_codec_that_rounds_is_held_to_the_text() -> None:
    assert all(verdict.holds for verdict in checks(ANSWERED | {"exact": False, "codec": "cachegen"}))


def test_tolerance_has_a_floor() -> None:
    same = ANSWERED | {"split_difference": 0.0, "resolution": 0.001, "cold_difference": 0.0039}
    assert all(verdict.holds for verdict in checks(same))


def test_parts_add_up() -> None:
    assert sum(parts(ANSWERED).values()) == pytest.approx(ANSWERED["warm_seconds"])


def test_kv_of_an_earlier_run_goes_unless_kept(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    canned(monkeypatch)
    kept = tmp_path / "kv" / "something"
    for options, there in ([], False), (["--keep"], True), ([], False):
        if (tmp_path / "job.json").exists():
            kept.parent.mkdir(exist_ok=True)
            kept.touch()
        assert CliRunner().invoke(app, ["--size", "small", "--out", str(tmp_path), *options]).exit_code == 0
        assert kept.exists() is there


@pytest.mark.parametrize("name", ["kv/mine", "laptop.yaml", "job.json", "result.json"])
def test_what_no_demo_made_is_neither_removed_nor_written_over(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    canned(monkeypatch)
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("{}")
    done = CliRunner().invoke(app, ["--size", "small", "--out", str(tmp_path)])
    assert done.exit_code == 2 and "not from a demo" in " ".join(done.output.split())
    assert mine.read_text() == "{}" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--size", "huge"], "'huge' is not small, medium"),
        (["--size", "small", "--model", "x/y"], "either --size or --model"),
        (["--codec", "raw", "--config", __file__], "either --codec or --config"),
        (["--document", "nowhere.txt"], "nowhere.txt"),
        ([], "evals/pylm is not in this folder nor above it"),
    ],
)
def test_bad_options(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert problem in done.output
    assert not list(tmp_path.iterdir())


def test_a_process_that_fails_says_why(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    monkeypatch.setattr(command.subprocess, "Popen", Forked)
    config = tmp_path / "mine.yaml"
    config.write_text("connector: plain\n")
    done = CliRunner().invoke(app, ["--size", "1M", "--out", str(tmp_path / "out"), "--config", str(config)])
    assert done.exit_code == 1
    assert "process 1 failed: ConfigError: connector" in done.output


def test_a_configuration_is_checked_before_a_process_loads_a_model(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    monkeypatch.setattr(command.subprocess, "Popen", None)
    config = tmp_path / "mine.yaml"
    config.write_text("connector: transformers\ntires: [memory]\n")
    done = CliRunner().invoke(app, ["--size", "1M", "--out", str(tmp_path / "out"), "--config", str(config)])
    assert isinstance(done.exception, ConfigError) and "tires" in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("text", "count"), [("small", 60e6), ("150M", 150e6), ("1.1b", 1.1e9), ("2000000", 2e6)])
def test_sizes(text: str, count: float) -> None:
    assert parameters(text) == count
    shape = llama_shape(int(count))
    layers, hidden = shape["num_hidden_layers"], shape["hidden_size"]
    kv_hidden = shape["num_key_value_heads"] * 64
    made = layers * (2 * hidden**2 + 2 * hidden * kv_hidden + 3 * hidden * shape["intermediate_size"])
    assert made == pytest.approx(count, rel=0.35)
    assert shape["num_attention_heads"] % shape["num_key_value_heads"] == 0


def test_chart_without_matplotlib_is_an_import_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError):
        draw_chart(ANSWERED, tmp_path / "chart.png")


def test_the_verb_is_light() -> None:
    script = f"import sys, {command.__name__}; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_document_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff")
    job = Job("", 1, str(tmp_path / "a.bin"), 1, "", "")
    with pytest.raises(ValueError, match=r"a\.bin is not a text in UTF-8"):
        worker.read_document(job, None, None)


def test_of_a_document_no_more_is_read_than_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "endless"
    path.touch()
    os.truncate(path, 1 << 40)
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(max_position_embeddings=None))
    tokenizer = SimpleNamespace(encode=lambda text: [1] * len(text))
    model = SimpleNamespace(config=config)
    assert worker.read_document(Job("", 1, str(path), 3, "", ""), model, tokenizer).shape == (1, 3)


@pytest.mark.parametrize("what", ["fifo", "hole", "nested", "link"])
def test_special_files_are_neither_waited_for_nor_read(tmp_path: Path, what: str) -> None:
    job = tmp_path / "job.json"
    if what == "fifo":
        os.mkfifo(job)
    elif what == "link":
        job.symlink_to("nothing")
    else:
        job.write_text("[" * 100_000)
        os.truncate(job, 1 << 43 if what == "hole" else 100_000)
    with pytest.raises(typer.BadParameter, match="is not from a demo"):
        command._check_own(tmp_path)
