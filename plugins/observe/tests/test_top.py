"""`kvloom top`: finding an engine, one frame of it, and what it says when there is none."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import socket
import sys
import termios
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from observe_support import busy, dripping, opened, own_sockets, path_of, port_of
from prometheus_client import parser
from rich.console import Console
from typer.testing import CliRunner

from kvloom import BackendError, ConfigError
from kvloom.cli.main import app, main
from kvloom_observe import ending, sources
from kvloom_observe.live.snapshot import View
from kvloom_observe.sources import Source, find
from kvloom_observe.top import watch as watch_module
from kvloom_observe.top.screen import screen
from kvloom_observe.top.watch import keys, quits, watch
from kvloom_testkit.faults import refusing_port


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_sockets(short_path, monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")


def top(*arguments: str) -> Any:
    return CliRunner().invoke(app(), ["top", *arguments])


def test_a_frame_has_the_tiers_the_hit_rate_and_the_hottest_prefix(tmp_path: Path) -> None:
    with opened(tmp_path, {"type": "live", "prefill_tokens_per_second": 24}, instance_id="mine") as engine:
        busy(engine)
        said = top("--once")
        named = top("mine", "--json")
    text = said.output
    assert said.exit_code == 0 and "mine: tiny" in text and "75.0% of 64 tokens in 4 requests" in text
    assert "48 tokens of prefill, 2.00 s at 24 tokens/s" in text and "in no tier 4 tokens" in text
    assert [line.split()[:2] for line in text.splitlines() if line.startswith(("memory", "disk"))] == [
        ["memory", "ok"],
        ["disk", "ok"],
    ]
    reads = [line.split()[6:8] for line in text.splitlines() if line.startswith(("memory", "disk"))]
    assert reads[0] == ["2.0", "KiB"] and reads[1][0] != "0", "of 32 tokens of 64 bytes, and of blobs"
    assert all(len(line) <= 80 for line in text.splitlines())
    assert json.loads(named.output)["requests"]["served_tokens"] == 48


def test_from_a_metrics_endpoint(tmp_path: Path) -> None:
    with opened(tmp_path, {"type": "prometheus", "port": 0}, instance_id="mine") as engine:
        busy(engine)
        text = top(f"http://127.0.0.1:{port_of(engine)}/metrics", "--once").output
    assert [line.split()[6] for line in text.splitlines() if line.startswith("memory")] == ["-"]
    assert "mine: tiny" in text and "75.0% of 64 tokens in 4 requests" in text and "in no tier 4 tokens" in text


def test_which_engine(tmp_path: Path) -> None:
    assert "no engine with `observers: [live]` runs" in str(top("--once").exception)
    with opened(tmp_path / "1", "live", instance_id="one"), opened(tmp_path / "2", "live", instance_id="two"):
        error = top("--once").exception
        assert isinstance(error, ConfigError) and "name one: one-" in str(error) and "two-" in str(error)
        assert "two: tiny" in top("two", "--once").output
        assert "no engine 'three' runs" in str(top("three", "--once").exception)
    assert "asked for by http://" in str(top("ftp://one", "--once").exception)
    assert "no engine is there" in str(top("~nobody-has-this-name/socket", "--once").exception)


def test_a_whole_name_is_not_the_beginning_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.sockets, "running", lambda: [Path("/x/e-7-2.sock"), Path("/x/e-7.sock")])
    assert find("e-7").name == "e-7" and find("e-7-").name == "e-7-2"


@pytest.mark.parametrize("url", ["http://[::1", "http://a..b/", "http://localhost:1/\u00e9"])
def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="not a URL that can be fetched; check it") as caught:
        sources.scrape(url)
    assert str(caught.value).startswith(url)


def test_looks_are_not_without_end_apart() -> None:
    assert "--every" in top("--every", "inf").output


def test_the_socket_of_a_dead_engine(short_path: Path) -> None:
    path = short_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    (short_path / "file").touch()
    for place, words in (
        (path, "its engine has ended"),
        (short_path / "file", "not a socket"),
        (short_path / "x", "no engine is"),
    ):
        for verb in (["top", "--once"], ["serve", "--port", "0"]):
            error = CliRunner().invoke(app(), [*verb, str(place)]).exception
            assert isinstance(error, BackendError) and words in str(error) and str(error).count(str(place)) == 1


def test_who_stops_reading_is_not_blamed_on_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with opened(tmp_path, "live"), os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(sys, "argv", ["kvloom", "top", "--once", "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
        monkeypatch.undo()
    assert ended.value.code == 1 and not capfd.readouterr().err


class Else(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        to = self.path.partition("?to=")[2]
        self.send_response(404 if "404" in self.path else 302 if to else 200)
        if to:
            self.send_header("Location", to)
        self.end_headers()
        if "binary" in self.path:
            self.wfile.write(b"\xff\xfe")
            return
        body = b"# HELP x y\n# TYPE x counter\nx_total 1\n" if "metrics" in self.path else b"<html> {"
        self.wfile.write(b'kvloom_engine_info{engine="one"} 1\n' if "labels" in self.path else body)

    def log_message(self, *_: Any) -> None: ...


def test_what_is_no_engine_of_kvloom(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), Else)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        for path, words in (
            ("metrics", "no metrics of kvloom"),
            ("labels", "no metrics of kvloom"),
            ("", "no metrics of"),
            ("404", "status 404"),
            ("binary", "no metrics"),
            ("?to=/metrics", "no metrics of kvloom"),
            ("?to=ftp://127.0.0.1:1/metrics", "unknown url type: ftp"),
            ("?to=file:///etc/passwd", "status 302"),
        ):
            error = top(f"http://127.0.0.1:{server.server_port}/{path}", "--once").exception
            assert isinstance(error, BackendError) and words in str(error)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    with refusing_port() as port:
        for word in (f"http://127.0.0.1:{port}/metrics", str(tmp_path / "nobody.sock")):
            error = top(word, "--once").exception
            assert isinstance(error, BackendError) and "\n" not in str(error) and str(error).count(word) == 1


def test_on_a_terminal_it_goes_on_without_the_engine_until_q(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(tmp_path, "live", instance_id="mine")
    busy(engine)
    path = path_of(engine)
    source = find(str(path))
    told = source.read(False)
    leader, follower = pty.openpty()
    shown = io.StringIO()
    monkeypatch.setattr(watch_module, "_keyboard", lambda: follower)
    before = termios.tcgetattr(follower)

    def read(series: bool) -> dict[str, Any]:
        """The keys are pressed once the engine has gone, and that is shown."""
        os.write(leader, b"x" if path.exists() else b"xq")
        engine.close()
        return source.read(series)

    watch(Source("mine", read), told, Console(file=shown, width=80, force_terminal=True), every=0.01)
    assert "75.0%" in shown.getvalue() and "q quits" in shown.getvalue() and "gone: " in shown.getvalue()
    assert termios.tcgetattr(follower) == before
    for key, ends in ((b"x", False), (b"Q", True), (b"\x1b[Aq", True), (b"\x04", True)):
        with keys() as keyboard:
            os.write(leader, key)
            assert quits(keyboard, 0.01) is ends
    os.close(leader)
    os.close(follower)


def test_texts_of_a_snapshot_do_nothing_to_the_terminal() -> None:
    told, shown = View(prefill_tokens_per_second=None).snapshot(), io.StringIO()
    told["engine"]["model"] = "m\x1b[2J" + "x" * 500
    times = {"p50": None, "p99": None}
    told["tiers"] = [
        {"name": "[/b]\x1b]0;t\x07", "state": "paused", "reason": "r\x9b2J", "bytes": 1, "capacity": 2,
         "served_tokens": 1, "read_bytes": 1, "waiting_bytes": 0, "read_seconds": times, "write_seconds": times},
    ]  # fmt: skip
    watch_module.frame(told, Console(file=shown, width=80))
    text = shown.getvalue()
    assert "[/b]?]0;t?" in text and "m?[2Jxx" in text and text.count("x") < 250
    assert all(char.isprintable() for char in text.replace("\n", ""))


@pytest.mark.parametrize("told", [{}, {"engine": []}, {"engine": {"pid": 1}, "requests": None}, {"engine": "text"}])
def test_what_is_no_snapshot_is_said_in_a_line(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="not the answer of a kvloom engine"):
        screen(told)
    monkeypatch.setattr(sources, "find", lambda word: Source("mine", lambda series: told))
    error = top("--once").exception
    assert isinstance(error, BackendError) and str(error).startswith("mine: ")


def test_metrics_that_end_where_a_name_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_answer", lambda url: b'kvloom_engine_info{engine="e", ={ version="1"} 1\n')
    with pytest.raises(ValueError, match="no metrics of"):
        sources.scrape("http://127.0.0.1/metrics")


def test_metrics_of_others_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = '# TYPE kvloom_requests counter\nkvloom_requests_total{engine="e"} 1\n'
    parsed: list[str] = []
    monkeypatch.setattr(sources, "_answer", lambda url: f"a 1\n{mine}# TYPE b counter\nkvloom_requests_of 1\n".encode())
    monkeypatch.setattr(parser, "text_fd_to_metric_families", lambda lines: parsed.extend(lines) or [])
    with pytest.raises(ValueError, match="no metrics of kvloom"):
        sources.scrape("http://127.0.0.1/metrics")
    assert parsed == mine.splitlines()


def test_metrics_are_bounded_in_length_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    line = b'kvloom_requests_total{engine="%s"} 1\n'
    monkeypatch.setattr(sources, "_answer", lambda url: line % (rb"\"" * (1 << 13)))
    with pytest.raises(ValueError, match="no metrics of Prometheus"):
        sources.scrape("http://127.0.0.1/metrics")
    passed = itertools.count()
    monkeypatch.setattr(sources, "time", SimpleNamespace(monotonic=lambda: float(next(passed))))
    monkeypatch.setattr(sources, "_answer", lambda url: line % b"e" * 100)
    with pytest.raises(OSError, match="metrics: its metrics take more than 10 seconds"):
        sources.scrape("http://127.0.0.1/metrics")
    assert next(passed) < 15, "nothing is parsed after that"


def test_a_number_beyond_all_is_no_metric_of_kvloom(monkeypatch: pytest.MonkeyPatch) -> None:
    info = b'kvloom_engine_info{engine="e",model="m",fingerprint="f",version="1"} 1\n'
    count = b"# TYPE kvloom_requested_tokens_total counter\n"
    count += b'kvloom_requested_tokens_total{engine="e",verb="load"} 1%s\n' % (b"0" * 400)
    monkeypatch.setattr(sources, "_answer", lambda url: info + count)
    with pytest.raises(ValueError, match="no metrics of kvloom"):
        sources.scrape("http://127.0.0.1/metrics")


def test_ctrl_c_ends_it_quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch_module, "frame", interrupted)
    with opened(tmp_path, "live"):
        said = top("--once")
    assert said.exit_code == 0 and said.output == ""


def test_without_a_terminal_no_key_is_waited_for() -> None:
    assert watch_module._keyboard() is None
    with keys() as keyboard:
        assert keyboard is None and not quits(keyboard, 0.0)


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n",
    ],
    ids=["head", "body", "no length", "redirection"],
)
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_an_answer_that_comes_a_byte_at_a_time_has_an_end(
    monkeypatch: pytest.MonkeyPatch, short_path: Path, begun: bytes, family: socket.AddressFamily
) -> None:
    monkeypatch.setattr(ending, "MAX_SECONDS", 0.1)
    path = str(short_path / "slow.sock")
    with dripping(begun or b"HTTP/1.1 200 OK\r\nX: ", path if family == socket.AF_UNIX else None) as port:
        place = path if family == socket.AF_UNIX else f"http://127.0.0.1:{port}/metrics"
        with pytest.raises((OSError, ValueError)):
            find(place).read(False)
    assert not [one for one in threading.enumerate() if isinstance(one, threading.Timer) and not one.finished.is_set()]


def test_the_body_of_a_redirection_is_not_read() -> None:
    request, body = urllib.request.Request("http://127.0.0.1/metrics"), io.BytesIO(b"long")
    made = sources._Redirections().redirect_request(request, body, 302, "Found", {}, "http://127.0.0.1/other")
    assert made is not None and made.full_url.endswith("/other") and body.closed
