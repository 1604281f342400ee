"""A Prometheus server that fetches what an engine exposes, and answers what the dashboard and the alerts ask."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kvloom import Engine, KVSpec

SPEC = KVSpec(model="tiny", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16")
SOON = 60.0
BOARD = files("kvloom_observe").joinpath("dashboards/kvloom.json")
ALERTS = files("kvloom_observe").joinpath("dashboards/alerts.yml")
Ask = Callable[[str], list[Any]]

QUIET = {
    "blended_tokens", "dropped_chunks", "tier_errors", "corrupt_chunks", "tier_pauses", "lost_events",
    "observer_errors",
}  # fmt: skip
"""Metrics without samples while an engine is well: a counter appears with its first event."""


@pytest.fixture(scope="session", autouse=True)
def installed() -> None:
    for program in ("prometheus", "promtool"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@pytest.fixture(scope="module")
def server(ports: tuple[int, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Fetches twice a second."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "alerts.yml").write_text(ALERTS.read_text())
    job = {"job_name": "kvloom", "static_configs": [{"targets": [f"127.0.0.1:{ports[0]}"]}]}
    settings = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "400ms", "evaluation_interval": "500ms"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [job],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    command = [
        "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{ports[1]}", "--log.level=error",
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=folder) as process:
        yield f"http://127.0.0.1:{ports[1]}/api/v1"
        process.terminate()


@pytest.fixture(scope="module")
def ask(server: str, ports: tuple[int, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Ask the server, which has seen an engine at work several times."""
    memory = {"type": "memory", "capacity": "64KiB"}
    disk = {"path": str(tmp_path_factory.mktemp("kv")), "capacity": "1MiB", "serializer": "torch"}
    config = {
        "chunk_tokens": 4,
        "tiers": [memory, {"type": "disk", **disk}],
        "observers": [{"type": "prometheus", "port": ports[0]}],
    }

    def answered(query: str) -> list[Any]:
        with urllib.request.urlopen(f"{server}/query?{urllib.parse.urlencode({'query': query})}", timeout=SOON) as told:
            return list(json.load(told)["data"]["result"])

    with Engine.open(config, SPEC) as engine:
        until = time.monotonic() + SOON
        for turn in range(10_000):
            work(engine, turn)
            try:
                fetched = answered('count_over_time(kvloom_evicted_chunks_total{tier="memory"}[1m])')
            except OSError:  # the server is still starting
                fetched = []
            if fetched and float(fetched[0]["value"][1]) > 5:
                break
            assert time.monotonic() < until, "Prometheus fetched nothing"
            time.sleep(0.1)
        yield answered


def work(engine: Engine, turn: int) -> None:
    """A store, a hit from memory, one from disk, a miss."""
    for seed in (turn, turn, max(0, turn - 8), -1 - turn):
        tokens = torch.randint(0, 1000, (16,), generator=torch.Generator().manual_seed(seed % 2**32))
        kv = torch.randn(2, 2, 16, 8, generator=torch.Generator().manual_seed(seed % 2**32)).to(torch.bfloat16)
        engine.retrieve(tokens, kv=kv)
        if seed >= 0:
            engine.store(tokens, kv=kv)
            assert engine.flush(SOON)


def queries() -> list[tuple[str, str]]:
    """Queries of the dashboard, with their panels' titles."""
    board = json.loads(BOARD.read_text())
    panels = [panel for row in board["panels"] for panel in (row, *row.get("panels", []))]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", [])]


@pytest.mark.parametrize(("title", "query"), queries())
def test_each_query_of_the_dashboard_is_answered(title: str, query: str, ask: Ask) -> None:
    asked = query.replace("$__rate_interval", "20s").replace("$engine", ".*")
    assert "$" not in asked
    quiet = {name for name in QUIET if f"kvloom_{name}" in query} or 'state!="ok"} > 0' in query
    until = time.monotonic() + SOON
    while not (found := ask(asked)) and not quiet and time.monotonic() < until:
        time.sleep(0.1)  # after a scrape that took too long a gauge has no value until the next one
    assert bool(found) != bool(quiet), title
    assert not found or any(one["value"][1] != "NaN" for one in found), title  # a tier that was not read has none


def test_each_alert_can_be_asked_and_none_cries_for_an_engine_that_is_well(ask: Ask, server: str) -> None:
    assert ask('ALERTS{alertname=~"KVLoom.*"}') == []
    with urllib.request.urlopen(f"{server}/rules", timeout=SOON) as told:
        rules = [rule for group in json.load(told)["data"]["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert [rule["name"] for rule in rules] == [
        rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]


def test_alerts_cry_when_a_tier_is_not_ok(tmp_path: Path) -> None:
    """In Prometheus' own time: a tier that is paused for as long as the rule waits."""
    (tmp_path / "alerts.yml").write_text(ALERTS.read_text())
    labels = {"engine": "e", "tier": "disk", "state": "paused"}
    state = 'kvloom_tier_state{engine="e",tier="disk",state="paused"}'
    well = 'kvloom_tier_state{engine="e",tier="disk",state="ok"}'
    said = "Tier disk of engine e has been paused for 5 minutes."
    alert = {"exp_labels": labels, "exp_annotations": {"summary": said}}
    test = {
        "interval": "1m",
        "input_series": [{"series": state, "values": "1+0x20"}, {"series": well, "values": "0+0x20"}],
        "alert_rule_test": [
            {"eval_time": "4m", "alertname": "KVLoomTierNotOk", "exp_alerts": []},
            {"eval_time": "6m", "alertname": "KVLoomTierNotOk", "exp_alerts": [alert]},
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_has_nothing_against_the_names(ask: Ask, ports: tuple[int, int]) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/metrics", timeout=SOON) as told:
        text = told.read().decode()
    ours = "".join(line for line in text.splitlines(keepends=True) if re.match(r"(# \w+ )?kvloom_", line))
    done = subprocess.run(["promtool", "check", "metrics"], input=ours, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
