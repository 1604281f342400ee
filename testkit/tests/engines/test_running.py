"""Rows, their order and outcomes, the reports, and the options, without an engine."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from engine_mutants import mutants

import kvloom_testkit
from kvloom import ConfigError
from kvloom_testkit.engines import hosting, report, running
from kvloom_testkit.engines.base import NotApplicableError, NotMetError
from kvloom_testkit.engines.bench import Bench
from kvloom_testkit.engines.damage import copy, damage
from kvloom_testkit.engines.process import EndedError, HangError, RaisedError, RefusedError
from kvloom_testkit.engines.prompts import tokens
from kvloom_testkit.engines.running import Row, check
from kvloom_testkit.engines.subject import Subject

KIT = Path(kvloom_testkit.__file__).parent
REQUIREMENTS = report.VLLM.requirements


class FakeBench:
    """A bench whose requirements raise what is written for them."""

    folder = Path("/somewhere")
    host = SimpleNamespace(about={"version": "0.32.1"})

    def __init__(self, monkeypatch: pytest.MonkeyPatch, errors: dict[str, Exception]) -> None:
        self.tried: list[str] = []
        self.begun = 0
        for number, about in REQUIREMENTS.items():
            test = self._test(number, errors.get(number))
            test.__doc__ = getattr(running.EngineConformance, about.test).__doc__
            monkeypatch.setattr(running.EngineConformance, about.test, test)

    def _test(self, number: str, error: Exception | None) -> Callable[..., None]:
        def test(requirements: object, bench: object) -> None:
            self.tried.append(number)
            if error is not None:
                raise error

        return test

    def start_over(self) -> None:
        self.begun += 1

    def close(self) -> None:
        pass


def outcomes(rows: list[Row]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.outcome, []).append(row.id)
    return found


def test_each_outcome_is_told_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {
        "E03": NotMetError("in /somewhere/main-0/a"), "E05": NotApplicableError("why"), "E07": RaisedError("it raised"),
    }  # fmt: skip
    bench: Any = FakeBench(monkeypatch, errors)
    told: list[Row] = []
    rows = check(bench, tell=told.append)
    assert told == rows and [row.id for row in rows] == bench.tried == list(REQUIREMENTS)
    found = outcomes(rows)
    assert found["not met"] == ["E03", "E07"] and found["skipped"] == ["E05"] and len(found["met"]) == len(rows) - 3
    assert rows[2].reason == "in main-0/a" and rows[4].reason == "why" and rows[6].reason == "it raised"
    assert bench.begun == 2, "what failed is not gone on with"


def test_a_measurement_is_said_of_what_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    bench: Any = FakeBench(monkeypatch, {})
    measured = lambda self, bench: "1.5 ms"  # noqa: E731
    measured.__doc__ = running.EngineConformance.test_E33_the_forward_path_does_not_wait.__doc__
    monkeypatch.setattr(running.EngineConformance, REQUIREMENTS["E33"].test, measured)
    assert [(row.outcome, row.reason) for row in check(bench, only=["E32", "E33"])] == [("met", ""), ("met", "1.5 ms")]


@pytest.mark.parametrize("error", [RefusedError("needs a GPU"), HangError("hangs"), EndedError("ended")])
def test_an_engine_that_does_not_start_is_tried_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    bench: Any = FakeBench(monkeypatch, {"E01": error})
    rows = check(bench, repeat=3)
    assert bench.tried == ["E01"] and outcomes(rows)["not tried"] == list(REQUIREMENTS)[1:]
    assert rows[0].reason == f"1 of 1 times: {error}" and rows[1].reason.startswith("the engine does not start")


def test_the_third_hang_or_end_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {"E02": HangError("1"), "E03": RaisedError("x"), "E04": EndedError("2"), "E06": HangError("3")}
    bench: Any = FakeBench(monkeypatch, errors)
    assert outcomes(check(bench))["not tried"] == list(REQUIREMENTS)[6:]
    assert bench.tried[-1] == "E06"


def test_each_is_tried_repeatedly_and_its_failures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    bench: Any = FakeBench(monkeypatch, {"E05": NotApplicableError("why"), "E07": HangError("hangs")})

    def now_and_then(self: object, bench: FakeBench) -> None:
        bench.tried.append("E03")
        if bench.tried.count("E03") in (2, 4):
            raise NotMetError(f"try {bench.tried.count('E03')}")

    now_and_then.__doc__ = getattr(running.EngineConformance, REQUIREMENTS["E03"].test).__doc__
    monkeypatch.setattr(running.EngineConformance, REQUIREMENTS["E03"].test, now_and_then)
    rows = check(bench, only=["E03", "E04", "E05", "E07", "E09"], repeat=5)
    assert bench.tried == ["E03"] * 5 + ["E04"] * 5 + ["E05"] + ["E07"] * running.TROUBLES
    assert [row.outcome for row in rows] == ["not met", "met", "skipped", "not met", "not tried"]
    assert rows[0].reason == "2 of 5 times: try 2" and rows[3].reason == "3 of 3 times: hangs"
    assert bench.begun == 5 + 4 + 3, "no try finds what another left"


def test_some_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench: Any = FakeBench(monkeypatch, {})
    assert [row.id for row in check(bench, only=["E09", "E17"])] == bench.tried == ["E09", "E17"]


@pytest.mark.parametrize(("tokens_", "logprobs", "said"), [
    ([1, 2, 3], [-1.0, -2.0, -3.0009], ""),
    ([1, 5, 3], [-1.0, -2.0, -3.0], r"answer is \[1, 5, 3\]; .* gives \[1, 2, 3\]"),
    ([1, 2, 3], [-1.0, -2.0, -3.1], "logprob 2 is -3.1"), ([1, 2, 3], [-1.0, float("nan"), -3.0], "logprob 1 is nan"),
    ([], [], "the answer is"),
])  # fmt: skip
def test_answers_are_compared_token_by_token(tokens_: list[int], logprobs: list[float], said: str) -> None:
    class Compared(Bench):
        def __init__(self) -> None:
            self.subject, self.block = Subject.named("a:C"), 32

        def own(self, request: Any, split: int = 0, **more: Any) -> Any:
            assert split == 64
            return {"tokens": [1, 2, 3], "logprobs": [-1.0, -2.0, -3.0]}

    answer = {"tokens": tokens_, "logprobs": logprobs, "cached": 64}
    if not said:
        Compared().compare(list(range(70)), answer)
        return
    with pytest.raises(NotMetError, match=f"a prompt of 2 x 32 \\+ 6 tokens, 64 of them found.*{said}"):
        Compared().compare(list(range(70)), answer)


ROWS = [
    Row("E01", "starts", "met", "", 1.5), Row("E02", "ends in order", "not met", "ended \x00 <&>", 2.0),
    Row("E03", "nothing to hit", "skipped", "no reset_cache", 0.0), Row("E04", "x", "not tried", "3 hang", 0.0),
]  # fmt: skip


def test_junit_has_a_case_for_each_row() -> None:
    suite = ElementTree.fromstring(report.xml(report.VLLM, Subject.named("a.b:C"), ROWS, 21.5))
    assert suite.attrib["tests"] == "4" and suite.attrib["failures"] == "1" and suite.attrib["skipped"] == "2"
    assert suite.attrib["time"] == "21.500"
    cases = list(suite)
    assert [case.attrib["name"][:3] for case in cases] == ["E01", "E02", "E03", "E04"]
    assert cases[1][0].tag == "failure" and cases[1][0].text == "ended ? <&>"
    assert cases[2][0].tag == "skipped" and not len(cases[0])
    assert cases[3][0].tag == "skipped" and cases[3][0].attrib["message"] == "3 hang"


def test_json_has_the_rows_and_what_was_checked() -> None:
    subject = Subject.named("a.b:C", extra={"x": 1})
    found = json.loads(json.dumps(report.document(report.VLLM, subject, "vLLM 0.32.0", ROWS, 21.5, short=True)))
    assert found["connector"] == "a.b:C" and found["extra"] == {"x": 1} and found["short"] and len(found["rows"]) == 4
    assert found["summary"] == "a.b:C on vLLM 0.32.0: 1 met, 1 not met, 1 skipped, 1 not tried, 22 s"
    assert found["seconds"] == 21.5


def test_the_table_says_why_something_was_not_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench: Any = FakeBench(monkeypatch, {"E01": RefusedError("needs a GPU")})
    engine = replace(report.VLLM, bench=lambda *_, **__: bench)
    assert report.run(engine, Subject.named("a.b:C"), only=["E01,E02"]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"E01  FAIL  starts +\d+\.\d s", first)
    assert re.fullmatch(r"E02  \?     ends in order +\d+\.\d s  the engine does not start with it.*", second)


OPTIONS: dict[str, Any] = dict.fromkeys(
    (
        "--connector", "--offloading-spec", "--secondary-tier", "--storage", "--cached", "--cache", "--extra",
        "--chunk", "--block", "--tolerance", "--settle", "--short", "--junit",
    )
)  # fmt: skip


@pytest.mark.parametrize(("change", "said"), [
    ({}, "--connector: missing"), ({"--connector": "a.b:1"}, "expected MODULE:CLASS"),
    ({"--connector": ":C"}, "expected MODULE:CLASS"), ({"--offloading-spec": "C"}, "--offloading-spec: expected"),
    ({"--connector": "a:C", "--offloading-spec": "a:D"}, "--offloading-spec: something else is checked by --conn"),
    ({"--secondary-tier": "a:"}, "--secondary-tier: expected"),
    ({"--offloading-spec": "a:C", "--secondary-tier": "a:D"}, "--secondary-tier: something else"),
    ({"--connector": "a:C", "--extra": "{"}, "--extra: expected a JSON"),
    ({"--connector": "a:C", "--extra": "[]"}, "--extra: expected a JSON"),
    ({"--connector": "a:C", "--extra": "[" * 100_000}, "--extra: expected a JSON"),
    ({"--connector": "a:C", "--block": 32, "--chunk": 48}, "--chunk: expected a multiple"),
    ({"--connector": "a:C", "--block": 0}, "--block: expected a multiple of 32"),
    ({"--connector": "a:C", "--block": 7}, "--block: expected a multiple of 32 tokens, as vLLM's"),
    ({"--connector": "a:C", "--chunk": 0}, "--chunk: expected a multiple of the block's 32"),
    ({"--connector": "a:C", "--settle": -1.0}, "--settle: expected 0 to 0.25 seconds, a quarter of --seconds, not -1"),
    ({"--secondary-tier": "a:C", "--settle": 0.26}, "--settle: expected 0 to 0.25 seconds"),
    ({"--connector": "a:C", "--settle": float("nan")}, "--settle: expected 0 to"),
])  # fmt: skip
def test_options_that_cannot_be(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        report.run_options("vllm", {**OPTIONS, **change}, {}, [], 1.0, as_json=False)


def test_other_engines_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="no engine 'other'"):
        report.run_options("other", OPTIONS, {}, [], 1.0, as_json=False)
    with pytest.raises(ConfigError, match="--thorough"):
        report.run_options("vllm", OPTIONS, {"--thorough": True}, [], 1.0, as_json=False)
    with pytest.raises(ConfigError, match="--repeat: expected at least 1, not 0"):
        report.run_options("vllm", {**OPTIONS, "--connector": "a:C"}, {}, [], 1.0, as_json=False, repeat=0)
    for engine, option in (("vllm", "--storage"), ("sglang", "--connector"), ("sglang", "--block")):
        with pytest.raises(ConfigError, match=f"{option}: `kvloom check engine {engine}` does not have"):
            report.run_options(engine, {**OPTIONS, option: "a:C"}, {}, [], 1.0, as_json=False)
    with pytest.raises(ConfigError, match=r"--cached: missing; write MODULE:CLASS.*; or --cache"):
        report.run_options("transformers", OPTIONS, {}, [], 1.0, as_json=False)
    with pytest.raises(ConfigError, match="--storage: missing; write MODULE:CLASS, as SGLang imports it"):
        report.run_options("sglang", OPTIONS, {}, [], 1.0, as_json=False)


def test_a_report_that_cannot_be_written_is_said_before_the_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []
    monkeypatch.setattr(report, "run", lambda *_, junit, **__: started.append(junit) or 0)
    for path in (tmp_path / "nowhere" / "report.xml", tmp_path):
        with pytest.raises(ConfigError, match=f"--junit: {path} cannot be written"):
            report.run_options("vllm", {**OPTIONS, "--connector": "a:C", "--junit": path}, {}, [], 1.0, as_json=False)
    good, before = tmp_path / "report.xml", tmp_path / "before.xml"
    before.write_text("of the last run")
    for path in (good, before):
        report.run_options("vllm", {**OPTIONS, "--connector": "a:C", "--junit": path}, {}, [], 1.0, as_json=False)
    assert started == [good, before] and not good.exists() and before.read_text() == "of the last run"


def test_settings_name_the_store_at_any_depth() -> None:
    subject = Subject.named("a:C", extra={"tiers": [{"path": "{tmp}/kv"}], "size": 3})
    transfer = subject.transfer(Path("/store"), "fail")
    assert transfer["kv_connector_extra_config"] == {"tiers": [{"path": "/store/kv"}], "size": 3}
    assert transfer["kv_load_failure_policy"] == "fail" and subject.has_store
    assert not Subject.named("a:C", extra={"size": 3}).has_store and Subject.named("Name").module is None
    assert Subject.named("a:C", block=64).chunk == 64


def test_the_engine_is_told_how_long_saves_may_take() -> None:
    told: dict[str, Any] = {}
    bench: Any = object.__new__(Bench)
    bench._llm = lambda limits: limits
    for options, settle in (({}, 0.3), ({"settle": 15.0}, 15.0)):
        bench.subject = Subject.named("a:C", seconds=60.0, **options)
        bench._start(SimpleNamespace(start=lambda **more: told.update(more)), {}, None)
        assert (told["settle"], told["patience"], bench.subject.settings["settle"]) == (settle, 15.0, settle)


def test_an_offloading_spec_is_a_setting_of_vllms_connector() -> None:
    subject = Subject.of_spec("a.b:Spec", extra={"path": "{tmp}"}, block=64)
    assert (subject.cls, subject.module, subject.chunk) == ("OffloadingConnector", None, 64) and subject.has_store
    assert subject.extra == {"spec_name": "Spec", "spec_module_path": "a.b", "path": "{tmp}"}


def test_a_secondary_tier_is_a_setting_of_vllms_tiering() -> None:
    subject = Subject.of_tier("a.b:Tier", extra={"path": "{tmp}"}, chunk=64)
    assert subject.cls == "OffloadingConnector" and subject.is_tier and subject.has_store
    assert subject.extra["secondary_tiers"] == [{"type": "Tier", "module_path": "a.b", "path": "{tmp}"}]
    assert subject.extra["block_size"] == 64
    assert str(subject) == "a.b:Tier" and str(Subject.named("a.b:C")) == "a.b:C" and str(Subject.named("C")) == "C"
    assert Subject.of_tier("fs", extra={}).extra["secondary_tiers"] == [{"type": "fs"}]


@pytest.mark.parametrize(
    ("engine", "folder"), [("vllm", "engines"), ("sglang", "storages"), ("transformers", "caches")]
)
def test_every_requirement_has_a_mutant(engine: str, folder: str) -> None:
    assert {mutant.values[1] for mutant in mutants(folder)} == set(report.ENGINES[engine].requirements)


def test_prompts_have_nothing_in_common() -> None:
    prompts = [tokens(seed, 100) for seed in range(300)]
    assert all(3 <= token < 512 for prompt in prompts for token in prompt)
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 300 and tokens(1, 9) == tokens(1, 20)[:9]


def test_damage_changes_every_file(tmp_path: Path) -> None:
    for how, size in (("cut", 500), ("flip", 1000), ("remove", None)):
        folder = tmp_path / how / "deep"
        folder.mkdir(parents=True)
        for name in "ab":
            (folder / name).write_bytes(bytes(1000))
        assert damage(tmp_path / how, how) == 2
        left = [path.read_bytes() for path in folder.iterdir()]
        assert [len(data) for data in left] == [] if size is None else [size] * 2
        assert how != "flip" or {place % 4 for place in range(1000) if left[0][place]} == {0, 1, 2, 3}


def test_what_links_lead_to_is_neither_damaged_nor_copied(tmp_path: Path) -> None:
    others, folder = tmp_path / "others", tmp_path / "store"
    for made in (others, folder / "deep"):
        made.mkdir(parents=True)
    (others / "file").write_bytes(bytes(1000))
    (folder / "deep" / "own").write_bytes(bytes(1000))
    (folder / "link").symlink_to(others / "file")
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "fifo")
    copy(folder, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").rglob("*")) == ["deep", "own"]
    for how in ("flip", "cut", "remove"):
        assert damage(folder, how) == 1
    assert (others / "file").read_bytes() == bytes(1000)


def test_holes_are_copied_and_damaged_as_holes(tmp_path: Path) -> None:
    store = tmp_path / "store" / "slab"
    store.parent.mkdir()
    with store.open("wb") as file:
        file.truncate(1 << 38)
        for place in (1 << 20, (1 << 38) - 5):
            file.seek(place)
            file.write(b"there")
    copy(store.parent, tmp_path / "copy")
    slab = tmp_path / "copy" / "slab"
    assert slab.stat().st_size == 1 << 38 and damage(slab.parent, "flip") == 1
    with slab.open("rb") as file:
        file.seek(1 << 20)
        assert file.read(5) == b"there"
        file.seek(-5, os.SEEK_END)
        assert file.read() == b"there"
    assert slab.stat().st_blocks * 512 < 1 << 20


class Connector:
    """Answers as connectors do that compute with numpy."""

    def generate(self) -> list[dict[str, Any]]:
        return [{"claimed": np.int64(32), "cached": torch.tensor(7)}]

    def seen(self) -> object:
        return object()

    def settle(self) -> None:
        raise RuntimeError("x" * 1_000_000)


def test_numbers_and_errors_of_a_connector_end_no_engine(short_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(short_path / "socket"))
        listening.listen()
        serving = threading.Thread(
            target=hosting.serve, args=(str(short_path / "socket"), "1", Connector()), daemon=True
        )
        serving.start()
        with listening.accept()[0] as connection, connection.makefile("rw") as lines:
            connection.settimeout(20)
            lines.readline()
            told = []
            for call in ("generate", "seen", "settle"):
                lines.write(json.dumps({"call": call, "args": {}}) + "\n")
                lines.flush()
                told.append(lines.readline())
        serving.join(10)
    assert json.loads(told[0]) == {"ok": [{"claimed": 32, "cached": 7}]}
    assert "TypeError" in json.loads(told[1])["error"] and "RuntimeError: xxx" in json.loads(told[2])["error"]
    assert max(map(len, told)) < 10_000


def test_what_a_connector_says_does_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report._explain([Row("E02", "ends in order", "not met", "\x1b[2Jended", 2.0)], REQUIREMENTS, sys.stdout)
    assert "\\x1b[2Jended" in capsys.readouterr().out


def test_the_kit_is_imported_without_an_engine() -> None:
    for path in [*(KIT / "engines").glob("*.py"), *(KIT / "engines/requirements").glob("*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) (vllm|transformers|sglang)\b", text, re.MULTILINE)
