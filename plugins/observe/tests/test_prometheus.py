"""Scrapes match the events; addresses, engines side by side, forks."""

from __future__ import annotations

import errno
import json
import os
import socket
import urllib.request
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from observe_support import SPEC, busy, kv_of, opened, port_of, settled, tokens_of
from prometheus_client.parser import text_string_to_metric_families
from promql import names_and_labels

from kvloom import ConfigError, Event, Health, Request
from kvloom_observe.prometheus import metrics as m
from kvloom_observe.prometheus.figures import Figures
from kvloom_observe.prometheus.observer import PrometheusObserver
from kvloom_observe.reasons import bounded
from kvloom_testkit.faults import free_port

ANY_PORT = {"type": "prometheus", "port": 0}
DOCS = Path(__file__).parents[3] / "docs" / "use" / "observe.md"


def scrape(port: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def value(told: Any, name: str, **labels: str) -> float:
    return sum(one for (found, its), one in told.items() if found == name and set(labels.items()) <= its)


def test_a_scrape_tells_what_happened(tmp_path: Path) -> None:
    with opened(tmp_path, ANY_PORT, instance_id="mine") as engine:
        busy(engine)
        told, counters, health = scrape(port_of(engine)), engine.counters(), engine.health()
    sums = {(key.name, key.tier): 0 for key in counters}
    for key, totals in counters.items():
        sums[key.name, key.tier] += totals.chunks
    assert value(told, "kvloom_retrieved_tokens_total") == 3 * 16
    assert value(told, "kvloom_written_chunks_total", tier="disk") == sums["stored", "disk"] == 160
    assert value(told, "kvloom_evicted_chunks_total", tier="memory", reason="capacity") == sums["evicted", "memory"] > 0
    assert value(told, "kvloom_evicted_chunks_total", tier="disk", reason="capacity") > 0
    assert value(told, "kvloom_promoted_chunks_total") == sums["promoted", "memory"] == 4
    assert value(told, "kvloom_requests_total", verb="retrieve", outcome="all") == 3
    assert value(told, "kvloom_requests_total", verb="retrieve", outcome="none") == 1
    assert value(told, "kvloom_missed_tokens_total", reason="in no tier") == 4
    assert value(told, "kvloom_missed_tokens_total", reason="behind a miss") == 12, "all of 16 that were asked for"
    assert value(told, "kvloom_source_tokens_total", tier="disk") == 16
    assert value(told, "kvloom_source_tokens_total", tier="memory") == 32
    assert value(told, "kvloom_codec_kv_bytes_total", tier="disk", codec="torch", way="encode") == 160 * 256
    assert value(told, "kvloom_codec_kv_bytes_total", tier="disk", codec="torch", way="decode") == 4 * 256
    assert value(told, "kvloom_request_seconds_count", verb="store") == 40
    assert value(told, "kvloom_tier_write_seconds_bucket", tier="disk", le="+Inf") == 160
    assert (
        value(told, "kvloom_tier_state", tier="disk", state="ok") == 1 == value(told, "kvloom_tier_state", tier="disk")
    )
    disk = next(tier for tier in health.tiers if tier.name == "disk")
    assert value(told, "kvloom_tier_bytes", tier="disk") == disk.bytes > 0
    assert value(told, "kvloom_tier_capacity_bytes", tier="disk") == 256 << 10
    assert {dict(labels)["engine"] for _, labels in told} == {"mine"}


def test_an_engine_that_closes_takes_its_figures_and_the_last_one_the_port(tmp_path: Path) -> None:
    one = opened(tmp_path / "1", ANY_PORT, instance_id="one")
    block = {"type": "prometheus", "port": port_of(one)}
    two = opened(tmp_path / "2", block, instance_id="one")
    assert {dict(labels)["engine"] for _, labels in scrape(block["port"])} == {"one", "one-2"}
    with opened(tmp_path / "3", block, instance_id="one-2"):
        assert {dict(labels)["engine"] for _, labels in scrape(block["port"])} == {"one", "one-2", "one-2-2"}
    one.close()
    assert {dict(labels)["engine"] for _, labels in scrape(block["port"])} == {"one"}
    two.close()
    with pytest.raises(OSError, match="refused"):
        scrape(block["port"])
    with opened(tmp_path / "3", block):
        scrape(block["port"])


def test_a_port_in_use_keeps_the_engine_from_opening(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^observers\.0: .*{port}.*set another `port`$"):
            opened(tmp_path, {"type": "prometheus", "port": port})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_does_not_hold_the_port(tmp_path: Path) -> None:
    with opened(tmp_path, ANY_PORT) as engine:
        port = port_of(engine)
        here, there = socket.socketpair()
        child = os.fork()
        if not child:  # pragma: no cover
            here.close()
            there.send(b"!")
            there.recv(1)
            os._exit(0)
        there.close()
        here.recv(1)  # the child runs, and what it does after a fork is done
    with pytest.raises(OSError, match="refused") as error:
        scrape(port)
    assert errno.errorcode.get(getattr(error.value, "reason", error.value).errno) == "ECONNREFUSED"
    here.close()
    os.waitpid(child, 0)


def test_a_tier_that_fails_is_told_and_the_scrape_does_not_wait_for_it(tmp_path: Path) -> None:
    with opened(tmp_path, ANY_PORT) as engine:
        engine.store(tokens_of(16), kv=kv_of(16))
        settled(engine)
        for path in (tmp_path / "kv").rglob("*"):
            if path.is_file() and "spec" not in str(path):
                path.write_bytes(b"damaged")
    with opened(tmp_path, ANY_PORT) as engine:
        engine.retrieve(tokens_of(16), kv=kv_of(16))
        settled(engine)
        told = scrape(port_of(engine))
    assert value(told, "kvloom_corrupt_chunks_total", tier="disk") >= 1
    assert value(told, "kvloom_requests_total", verb="retrieve", outcome="none") == 1


def test_reasons_are_bounded() -> None:
    for name in ("missed", "corrupt", "evicted", "dropped", "tier_error", "observer_error"):
        said = {bounded(name, f"read: wrong {number} of {name} {'x' * number}") for number in range(200)}
        assert len(said) == 1
    assert bounded("tier_error", "put: TimeoutError") == "put: TimeoutError"
    assert bounded("missed", "unreadable: serializer 'x' is not this tier's") == "unreadable"
    assert bounded("missed", "in no tier") == "in no tier"


class Still:
    """An engine in which nothing is."""

    instance_id, fingerprint, spec = "e", "f", SPEC

    def health(self) -> Health:
        return Health(())

    def counters(self) -> dict[Any, Any]:
        return {}


def test_histograms_count_in_the_right_bucket() -> None:
    figures = Figures()
    figures.engine = type(
        "Engine",
        (),
        {
            "instance_id": "e",
            "fingerprint": "f",
            "spec": SPEC,
            "health": lambda self: type("H", (), {"tiers": ()})(),
            "counters": lambda self: {},
        },
    )()
    for seconds in (0.0, 0.0001, 0.00011, 9.9, 11.0):
        figures.event(Event("retrieved", "disk", 1, 1, 1, seconds))
    (one,) = [sample for sample in figures.samples() if sample.metric is m.READ_SECONDS]
    counts = dict(zip([*m.LATENCY_BUCKETS, float("inf")], one.buckets, strict=True))
    assert counts[0.0001] == 2 and counts[0.00025] == 1 and counts[10.0] == 1 and counts[float("inf")] == 1
    assert sum(one.buckets) == 5 and one.value == pytest.approx(20.90021)


def test_a_request_of_an_unknown_verb_is_counted_too() -> None:
    figures = Figures()
    figures.request(Request("dream", 0.0, 1.0, 8, 4, (), (), 0, 8, 4, {}, (), ""))
    assert figures._sums[m.REQUESTS, ("dream", "part")] == 1


DASHBOARD = json.loads(files("kvloom_observe").joinpath("dashboards/kvloom.json").read_text())


def expressions() -> list[str]:
    panels = [panel for row in DASHBOARD["panels"] for panel in (row, *row.get("panels", []))]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return queries + [
        one["query"]["query"] for one in DASHBOARD["templating"]["list"] if isinstance(one["query"], dict)
    ]


EXPOSED = {
    name: {"engine", *metric.labels} | ({"le"} if name.endswith("_bucket") else set())
    for metric in m.METRICS
    for name in (
        [f"{metric.name}_total"] if metric.kind == "counter"
        else [metric.name] if metric.kind == "gauge"
        else [f"{metric.name}{ending}" for ending in ("_bucket", "_sum", "_count")]
    )
}  # fmt: skip


def unknown(expression: str) -> list[str]:
    """The metrics and labels in a query that are not exposed."""
    wrong = []
    for name, labels in names_and_labels(expression):
        if name not in EXPOSED:
            wrong.append(name)
        else:
            wrong += [f"{name}{{{label}}}" for label in labels - EXPOSED[name] - {"job", "instance"}]
    return wrong


@pytest.mark.parametrize("expression", expressions())
def test_each_query_of_the_dashboard_asks_for_what_there_is(expression: str) -> None:
    assert names_and_labels(expression) and not unknown(expression)


def test_a_query_for_something_else_is_noticed() -> None:
    assert unknown("rate(kvloom_retreived_tokens_total[1m])") == ["kvloom_retreived_tokens_total"]
    assert unknown('sum by (colour) (kvloom_tier_bytes{engine="a"})') == ["kvloom_tier_bytes{colour}"]


def test_all_that_is_exposed_was_declared_and_the_docs_have_each(tmp_path: Path) -> None:
    with opened(tmp_path, ANY_PORT) as engine:
        busy(engine)
        told = scrape(port_of(engine))
    for name, labels in told:
        assert {label for label, _ in labels} == EXPOSED[name], name
    text = DOCS.read_text()
    for metric in m.METRICS:
        name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
        assert f"| `{name}` | {', '.join(metric.labels) or '–'} | {metric.help} |" in text


def test_an_engine_that_does_not_open_gives_its_port_back(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(ConfigError, match=r"observers\.1: path: there is no directory"):
        opened(tmp_path, {"type": "prometheus", "port": port}, {"type": "live", "path": str(tmp_path / "no/s")})
    socket.create_server(("127.0.0.1", port)).close()


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install .*observe\[prometheus\]'"):
        PrometheusObserver(PrometheusObserver.Config(port=0))
