"""Examples in docs/use/size.md, why.md and first-day.md work as shown: files, commands, and their output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs/use"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

Shell = Callable[[str], str]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Runs a command in an empty directory, where `kvloom` and `python` are those of this environment."""
    tools = tmp_path / "bin"
    tools.mkdir()
    run = "from kvloom.cli.main import main; main()"
    (tools / "kvloom").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{run}' \"$@\"\n")
    (tools / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "COLUMNS": "200"}

    def shell(command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    return shell


def blocks(page: str, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")) if kind == language]


def commands(page: str) -> list[str]:
    return [line for block in blocks(page, "sh") for line in block.splitlines()]


@pytest.mark.slow
def test_sizing_from_record_to_chart(shell: Shell, tmp_path: Path) -> None:
    (serve,) = blocks("size.md", "python")
    assert serve.startswith("# serve.py: ")
    (tmp_path / "serve.py").write_text(serve)
    (config,) = (text for text in blocks("size.md", "yaml") if text.startswith("# kv.yaml\n"))
    (tmp_path / "kv.yaml").write_text(config)
    record, replay, curve = commands("size.md")
    shell(record)
    assert (tmp_path / "requests.jsonl").is_file() and (tmp_path / "spec.json").is_file()
    printed = shell(replay)
    assert all(word in printed for word in ("tokens hit", "without limits", "the engine that was recorded had"))
    result = json.loads(shell(f"{curve} --json"))
    rates = [run["hit_rate"] for run in result["runs"]]
    memory = [run["tiers"][0]["hit_rate"] for run in result["runs"][:-1]]
    assert memory == sorted(memory) and memory[0] < 0.5 * memory[-1], "there is something to see in the chart"
    assert rates[-1] == max(rates) and (tmp_path / "size.svg").read_text().startswith("<?xml")
    assert (DOCS / "size.svg").is_file()


@pytest.mark.slow
def test_the_lines_that_are_shown_are_read(shell: Shell, tmp_path: Path) -> None:
    lines = [json.loads(text) for text in blocks("size.md", "json")]
    ours, theirs = lines
    theirs["hash_ids"] = [*range(14)]
    (tmp_path / "kv.yaml").write_text("tiers: [{type: memory, capacity: 1GiB}]")
    for line in (ours, theirs):
        (tmp_path / "trace.jsonl").write_text(json.dumps(line))
        result = json.loads(shell("kvloom trace replay trace.jsonl kv.yaml --bytes-per-token 1024 --json"))
        assert (result["trace"]["lines"], result["trace"]["broken"]) == (1, 0)


@pytest.mark.slow
def test_a_miss_is_explained(shell: Shell, tmp_path: Path) -> None:
    (script,) = blocks("why.md", "python")
    (tmp_path / "prepare.py").write_text(script)
    shell("python prepare.py")
    first, second = commands("why.md")
    printed = shell(first)
    (shown,) = blocks("why.md", "text")
    wanted = [line.split() for line in shown.splitlines() if re.match(r"\s+\d+-\d+", line)]
    found = [line.split() for line in printed.splitlines() if re.match(r"\s+\d+-\d+", line)]
    assert [line[:3] for line in found] == [line[:3] for line in wanted]
    assert shown.splitlines()[-1] in printed
    answer = json.loads(shell(second))
    assert [chunk["verdict"] for chunk in answer["chunks"]] == 2 * ["hit"] + 4 * ["never stored"]
    assert [piece["verdict"] for piece in answer["pieces"]] == 2 * ["hit"]
    mentioned = re.findall(r"^\| `([a-z ]+)` \|", (DOCS / "why.md").read_text(), re.MULTILINE)
    from kvloom_tools import fates

    known = [fates.HIT, *fates._TELLING, fates.OTHER_SALT, fates.OTHER_FINGERPRINT, fates.NEVER, fates.GONE]
    assert sorted(mentioned) == sorted(known)


@pytest.mark.slow
def test_the_first_day(shell: Shell, tmp_path: Path) -> None:
    (config,), (app,) = blocks("first-day.md", "yaml"), blocks("first-day.md", "py")
    lmcache = next(text for text in blocks("first-day.md", "text") if text.startswith("chunk_size"))
    for name, text in (("kv.yaml", config), ("app.py", app), ("lmcache.yaml", lmcache)):
        (tmp_path / name).write_text(text)
    said = {command: shell(command) for command in commands("first-day.md")}
    doctor, run, stat, why, _, replay, brought, checked = said.values()
    assert " 0 problems" in doctor and "disk" in stat and checked.startswith("from_lmcache.yaml: ok")
    there, of = map(int, re.findall(r"\d+", run))
    assert 0.5 * of < there < of
    assert "never stored" in why and "hit" in why
    assert "tokens hit" in replay and not brought
    again = shell("python app.py")
    assert int(re.findall(r"\d+", again)[0]) > there, "what is on the disk is found after a restart"
