"""The page: what it answers and to whom; in a browser, what it shows."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from observe_support import SPEC, busy, opened, own_sockets, tokens_of
from typer.testing import CliRunner

from kvloom import ConfigError, Engine
from kvloom.cli.main import app
from kvloom_observe.http_messages import Request, RequestError, Response
from kvloom_observe.http_server import listening
from kvloom_observe.serve import questions as questions_module
from kvloom_observe.serve import server
from kvloom_observe.serve.daemon_threads import DaemonThreads
from kvloom_observe.serve.questions import Questions
from kvloom_observe.serve.server import Page
from kvloom_observe.sources import Source, find

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_sockets(short_path, monkeypatch)


@contextmanager
def served(engine: Engine, folder: Path, *, why: bool = False) -> Iterator[Page]:
    config, spec = folder / "kv.yaml", folder / "spec.json"
    disk = f"{{type: disk, path: {folder / 'kv'}, capacity: 256KiB, serializer: torch}}"
    config.write_text(f"chunk_tokens: 4\nconnector: plain\ntiers: [{disk}]\n")
    spec.write_text(SPEC.to_json())
    page = Page(find(None), "127.0.0.1", 0, config=config if why else None, spec=spec if why else None)
    thread = threading.Thread(target=page.run)
    thread.start()
    try:
        yield page
    finally:
        page.stop()
        thread.join()
        page.close()


def ask(page: Page, path: str, method: str = "GET", body: str | None = None, **headers: str) -> tuple[int, Any, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    connection.request(method, path, body, {"Host": f"127.0.0.1:{page.port}", **headers})
    answer = connection.getresponse()
    text, told = answer.read(), answer.headers
    connection.close()
    return (
        answer.status,
        json.loads(text) if told["Content-Type"].startswith("application/json") else text.decode(),
        told,
    )


def test_the_page_the_snapshot_and_nothing_else(tmp_path: Path) -> None:
    with opened(tmp_path, "live") as engine, served(engine, tmp_path) as page:
        busy(engine)
        status, text, headers = ask(page, "/")
        assert status == 200 and "<title>kvloom</title>" in text and "http" not in text.replace("http-equiv", "")
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        for path in ("/page.js", "/page.css"):
            assert ask(page, path)[0] == 200
        status, told, _ = ask(page, "/snapshot.json")
        assert (
            status == 200 and told["requests"]["served_tokens"] == 48 and told["series"]["1"]["at"] and not told["why"]
        )
        assert ask(page, "/../secrets")[0] == 404 and ask(page, "/static/page.js")[0] == 404
        assert ask(page, "/why.json", "POST", "{}")[0] == 404
        for method in ("PUT", "DELETE", "OPTIONS"):
            status, told, headers = ask(page, "/", method)
            assert status == 501 and "Unsupported" in told["error"] and headers["Content-Security-Policy"]
        assert ask(page, "/page.js", "HEAD")[:2] == (200, "")


def test_pages_of_others_get_no_answer(tmp_path: Path) -> None:
    with opened(tmp_path, "live") as engine, served(engine, tmp_path) as page:
        assert ask(page, "/snapshot.json", Host="evil.example")[0] == 403
        assert ask(page, "/snapshot.json", Origin="http://evil.example")[0] == 403
        assert ask(page, "//[x")[0] == ask(page, "/snapshot.json", Origin="http://[")[0] == 400
        assert ask(page, "/snapshot.json", Host=f"localhost:{page.port}")[0] == 200
        assert ask(page, "/snapshot.json", Origin=f"http://127.0.0.1:{page.port}")[0] == 200


@pytest.mark.parametrize(
    ("host", "named", "answered"),
    [
        ("2001:db8::1", "[2001:db8::1]:80", True), ("2001:DB8:0::1", "[2001:db8::1]", True), ("::1", "[::1]:80", True),
        ("0:0:0:0:0:0:0:1", "[::1]", True), ("::1", "a..b", False), ("2001:db8::1", "[::1]", False),
        ("2001:db8::1", "[2001:db8::2]:80", False), ("2001:db8::1", "[", False),
    ],
)  # fmt: skip
def test_an_address_of_six_is_a_name_too(
    monkeypatch: pytest.MonkeyPatch, host: str, named: str, answered: bool
) -> None:
    monkeypatch.setattr(server, "listening", lambda *_: listening("127.0.0.1", 0))
    page = Page(cast(Source, None), host, 0, config=None, spec=None)
    headers = http.client.HTTPMessage()
    headers["Host"] = named
    with nullcontext() if answered else pytest.raises(RequestError, match="names another server"):
        page._check_origin(Request("GET", "/", headers))
    page.close()


NO_FILES: Any = ()


def in_process(self: Questions, command: list[str], files: tuple[int, int]) -> tuple[int, str, str]:
    """A process of Python takes seconds to start."""
    assert command[:4] == [sys.executable, "-P", "-m", "kvloom"], "nothing is imported from the working directory"
    assert not any("tenant" in word for word in command), "other users see the command"
    assert [os.fstat(file).st_nlink for file in files] == [0, 0], "a file without a name is left nowhere"
    done = CliRunner().invoke(app(), command[4:])
    return done.exit_code, done.stdout, done.stderr


def test_why_was_it_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Questions, "_run", in_process)
    with opened(tmp_path, "live") as engine, served(engine, tmp_path, why=True) as page:
        busy(engine)
        json_type = {"Content-Type": "application/json"}
        body = json.dumps({"tokens": tokens_of(20, 39).tolist()})
        status, told, _ = ask(page, "/why.json", "POST", body, **json_type)
        assert status == 200 and [one["verdict"] for one in told["chunks"]] == ["hit"] * 4 + ["never stored"]
        assert told["chunks"][0]["tiers"] == ["disk"] and told["leading_tokens"] == 16
        body = json.dumps({"tokens": tokens_of(20, 39).tolist(), "salts": ["a tenant", ""]})
        status, told, _ = ask(page, "/why.json", "POST", body, **json_type)
        assert status == 200 and {one["verdict"] for one in told["chunks"]} == {"other salt", "never stored"}
        wrong = (json.dumps({"tokens": one}) for one in ("x", [1.5], [-1]))
        for bad in ("[", "[" * 100_000, "{}", '{"tokens": {"1": 2}}', '{"tokens": [100000000000000000000000]}', *wrong):
            status, told, _ = ask(page, "/why.json", "POST", bad, **json_type)
            assert (status, told["error"]) == (400, "tokens: a JSON list of token ids")
        for bad, words in (
            ("[3]", "a JSON list of strings"),
            ('"abc"', "a JSON list of strings"),
            ('["\\ud800"]', "not valid UTF-8"),
            (json.dumps(["x" * 200_000]), "one of 200000 bytes; 4096 at most"),
            (json.dumps(["x"] * 100_000), "100000, and 64 at most"),
        ):
            status, told, _ = ask(page, "/why.json", "POST", f'{{"tokens": [1], "salts": {bad}}}', **json_type)
            assert status == 400 and told["error"].startswith("salts: ") and words in told["error"]
        assert ask(page, "/snapshot.json", "POST", body)[1] == {"error": "there is no such question; POST /why.json"}
        assert ask(page, "/why.json", "POST", body)[0] == 400


def test_one_process_at_a_time_answers_and_ends_with_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = Questions(Path("kv.yaml"), Path("spec.json"))
    command = [sys.executable, "-Sc", "import sys; print(1); print(2, file=sys.stderr); sys.exit(3)"]
    assert questions._run(command, NO_FILES) == (3, "1\n", "2\n")
    later = [questions.ask(b'{"tokens": [1]}', lambda *said: Response(said[0])) for _ in range(2)]
    assert {(one.executor, one.threads) for one in later} == {(questions._executor, 1)}
    hangs = [sys.executable, "-Sc", "import time; print(flush=True); time.sleep(60)"]
    running = questions._executor.submit(questions._run, hangs, NO_FILES)
    while questions._running is None:
        time.sleep(0.001)
    questions.close()
    assert running.result(60)[0] == -signal.SIGKILL
    assert questions._run(hangs, NO_FILES)[0] == -signal.SIGKILL, "it was started while the page was closed"
    monkeypatch.setattr(questions_module, "_SECONDS", 0.0)
    with pytest.raises(subprocess.TimeoutExpired):
        questions._run(hangs, NO_FILES)


def test_a_source_that_hangs_keeps_neither_the_page_nor_the_process() -> None:
    asked, over = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def read(series: bool) -> dict[str, Any]:
        threads.append(threading.current_thread())
        asked.set()
        over.wait(60)
        raise OSError("gone")

    page = Page(Source("mine", read), "127.0.0.1", 0, config=None, spec=None)
    serving = threading.Thread(target=page.run)
    serving.start()
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    connection.request("GET", "/snapshot.json")
    assert asked.wait(60)
    page.stop()
    serving.join()
    page.close()
    assert threads[0].is_alive() and threads[0].daemon
    over.set()
    connection.close()
    threads[0].join()


def test_without_a_thread_the_error_is_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert isinstance(DaemonThreads("x").submit(print).exception(0), RuntimeError)


def test_an_engine_that_goes_away_is_said(tmp_path: Path, short_path: Path) -> None:
    engine = opened(tmp_path, "live")
    with served(engine, tmp_path) as page:
        assert ask(page, "/snapshot.json")[0] == 200
        engine.close()
        status, told, _ = ask(page, "/snapshot.json")
        assert status == 503 and str(short_path) in told["error"] and "start one with" in told["error"]


def test_json_says_where_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Page, "run", lambda page: None)
    with opened(tmp_path, "live"):
        said = json.loads(CliRunner().invoke(app(), ["serve", "--port", "0", "--json"]).stdout)
    assert said["url"].startswith("http://127.0.0.1:")


def test_a_port_in_use_and_half_of_a_question(tmp_path: Path) -> None:
    with opened(tmp_path, "live") as engine, served(engine, tmp_path) as page:
        said = CliRunner().invoke(app(), ["serve", "--port", str(page.port)])
        assert f"port {page.port}" in str(said.exception) and "--port" in str(said.exception)
        for host in ("a..b", "nowhere.invalid"):
            said = CliRunner().invoke(app(), ["serve", "--port", "0", "--host", host])
            assert host in str(said.exception) and "--host" in str(said.exception)
        half = CliRunner().invoke(app(), ["serve", "--config", str(tmp_path / "kv.yaml")]).exception
        assert isinstance(half, ConfigError)
        there, gone = str(tmp_path / "kv.yaml"), str(tmp_path / "gone")
        for config, spec in ((gone, str(tmp_path / "spec.json")), (there, gone)):
            said = CliRunner().invoke(app(), ["serve", "--port", "0", "--config", config, "--spec", spec])
            assert isinstance(said.exception, ConfigError) and gone in str(said.exception)
        wrong = tmp_path / "wrong.yaml"
        wrong.write_text("tiers: [{type: disk, pth: kv}]")
        said = CliRunner().invoke(app(), ["serve", "--config", str(wrong), "--spec", str(tmp_path / "spec.json")])
        assert "tiers.0.pth: unknown key" in str(said.exception)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (apt-get install chromium)")
def test_in_a_browser(tmp_path: Path) -> None:
    """Drawn by Chromium: the tiers, the plots, no error on the console, nothing fetched from elsewhere."""
    block = {"type": "live", "prefill_tokens_per_second": 24}
    with opened(tmp_path, block, instance_id="mine") as engine, served(engine, tmp_path) as page:
        busy(engine)
        base = [
                str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,1400",
                f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr",
                "--v=0", "--virtual-time-budget=6000",
            ]  # fmt: skip
        url = f"http://127.0.0.1:{page.port}/"
        done = subprocess.run([*base, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True)
        subprocess.run(
            [*base, f"--screenshot={tmp_path / 'page.png'}", url], capture_output=True, timeout=120, check=True
        )
    dom = done.stdout
    assert "mine: tiny" in dom and "75.0 %" in dom and '<td class="text">disk</td>' in dom
    assert dom.count('<path class="a"') >= 2 and "in no tier" in dom
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    assert (tmp_path / "page.png").stat().st_size > 10_000
