"""An engine that hangs, ends, raises or does not start is told apart, in time, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom import ConfigError
from kvloom_testkit.engines import process
from kvloom_testkit.engines.process import EndedError, HangError, Host, RaisedError, RefusedError

PATH = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host("fake_host", environment=PATH) as host:
        yield host


def is_there(process: int) -> bool:
    """Return whether a process runs."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(process: int) -> bool:
    """Return whether a process ends soon."""
    until = time.monotonic() + 10
    while is_there(process) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_there(process)


def test_calls_are_answered_in_turn(host: Host) -> None:
    engine = host.fork(20)
    for number in range(3):
        text = "x" * 200_000  # more than a socket takes at once
        assert engine.call("echo", number=number, text=text)["heard"]["args"] == {"number": number, "text": text}
    engine.close()
    assert not engine.alive and gone(engine.process)


def test_a_call_may_begin_before_others_end_elsewhere(host: Host) -> None:
    engines = host.fork(20), host.fork(20)
    waiting = [one.begin("echo", number=number) for number, one in enumerate(engines)]
    assert [wait()["heard"]["args"]["number"] for wait in reversed(waiting)] == [1, 0]
    engines[0].begin("start")
    assert engines[0].call("echo", number=2)["heard"]["args"] == {"number": 2}, "not the answer that nobody waited for"
    for one in engines:
        one.close()


def test_one_that_hangs_is_killed_with_its_children_and_the_place_is_said(host: Host) -> None:
    engine = host.fork(1.0)
    child = engine.call("start_child")
    assert is_there(child)
    with pytest.raises(
        HangError, match=r"no answer to hang after 1 s; it was at engines/fake_host.py.*a_place_to_hang"
    ):
        engine.call("hang")
    assert gone(engine.process) and gone(child)
    with pytest.raises(EndedError, match="has ended before"):
        engine.call("echo")


@pytest.mark.parametrize(("call", "arguments", "said"), [
    ("die", {"signal": int(signal.SIGSEGV)}, "by signal 11 in die: last words"),
    ("exit", {"status": 3}, "with status 3 in exit"),
])  # fmt: skip
def test_one_that_ends_is_said_to_have(host: Host, call: str, arguments: dict[str, int], said: str) -> None:
    engine = host.fork(20)
    child = engine.call("start_child")
    with pytest.raises(EndedError, match=said):
        engine.call(call, **arguments)
    assert not engine.alive and gone(child)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.kill", lambda *args: pytest.fail("its number may be another's"))
        patched.setattr("os.killpg", lambda *args: pytest.fail("its number may be another's"))
        engine.kill()


def test_of_one_that_leaves_the_place_is_said_and_nothing_of_its_log() -> None:
    with Host("leaving_host", environment=PATH) as host:
        engine = host.fork(20)
        said = r"with status 3 in start; it was at engines/leaving_host.py, line \d+ in leaves, called by .* in start"
        with pytest.raises(EndedError, match=said) as caught:
            engine.call("start")
        assert "before" not in str(caught.value)
        engine = host.fork(20)
        engine.call("fork_and_leave")
        engine.close()


def test_one_that_raises_at_start_has_refused(host: Host) -> None:
    engine = host.fork(20)
    with pytest.raises(RefusedError, match=r"refused to start: start: RuntimeError: needs a GPU \(at b/c.py, line 7"):
        engine.start()
    assert gone(engine.process)


def test_one_that_raises_later_goes_on(host: Host) -> None:
    engine = host.fork(20)
    with pytest.raises(RaisedError, match="needs a GPU"):
        engine.call("start")
    assert engine.call("echo")
    engine.kill()


def test_one_that_does_not_end_is_killed(host: Host) -> None:
    engine = host.fork(1.0)
    engine.call("lingers")
    with pytest.raises(HangError, match="did not end 1 s after it was closed"):
        engine.close()
    assert gone(engine.process)


@pytest.mark.parametrize(("fault", "said"), [
    ("breaks", "no such engine here"), ("refuses", "libcuda is not here"),
])  # fmt: skip
def test_an_engine_that_cannot_be_imported_is_said(fault: str, said: str) -> None:
    with pytest.raises(RefusedError, match=f"(?s)could not be imported.*{said}"):
        Host("fake_host", environment={**PATH, "FAKE_HOST": fault}, seconds=20)


def test_closing_the_host_leaves_nothing() -> None:
    host = Host("fake_host", environment=PATH)
    assert host._process is not None
    folder, number = host.folder, host._process.pid
    host.close()
    assert not folder.exists() and gone(number)


def test_ctrl_c_while_it_is_imported_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started: list[int] = []

    def interrupted(host: Host, *_: object) -> None:
        assert host._process is not None
        started.append(host._process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(Host, "_connection", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Host("fake_host", environment=PATH)
    assert gone(started[0]) and not [*tmp_path.iterdir()]


def test_a_directory_whose_name_is_too_long_for_a_socket_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ConfigError, match=f"TMPDIR: no socket can be made in {folder}"):
        Host("fake_host", environment=PATH)
    assert not [*folder.iterdir()]


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    os.truncate(log, 1 << 40)
    with log.open("ab") as file:
        file.write(b"\nlast words\n")
    assert process._end_of(log).endswith("last words")


def test_lines_of_a_log_are_not_cut(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"before\n{'x' * 400}\n{'y' * 400}\nlast words\n")
    assert process._end_of(log) == f"{'y' * 400}\nlast words"
    log.write_text("z" * 1000)
    assert process._end_of(log) == "z" * 600
