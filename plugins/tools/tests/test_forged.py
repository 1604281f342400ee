"""Records and keys that somebody else has put into a store neither end a command nor reach the terminal as they are."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import SPEC, Rack, fill, rack_installed, run
from hypothesis import given
from hypothesis import strategies as st

from kvloom.cli import output

ESCAPES = "\x1b[31mEVIL\x1b]0;pwned\x07\r\x08\u202e\x9b31m"


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Path]:
    with rack_installed(tmp_path):
        config = tmp_path / "one.yaml"
        config.write_text("chunk_tokens: 4\ntiers: [{type: rack, label: one}]\n")
        yield config
    Rack.racks.clear()
    Rack.before.clear()


def acts(text: str) -> list[str]:
    return [one for one in text if one != "\n" and unicodedata.category(one) in ("Cc", "Cf", "Cs")]


def test_a_models_name_does_not_steer_the_terminal(rack: Path) -> None:
    fill(rack, 2)
    blobs = Rack.racks["one"]
    (name,) = [key for key in blobs if key.startswith("spec/")]
    record = json.loads(blobs[name])
    record["spec"] |= {"model": ESCAPES, "revision": "r" * 50_000}
    blobs[name] = json.dumps(record).encode()
    done = run("stat", rack)
    assert not acts(done.out + done.err) and "EVIL" in done.out and len(done.out) < 10_000


def test_an_error_of_a_server_does_not_either(rack: Path) -> None:
    def fail(verb: str, key: str) -> None:
        raise OSError(ESCAPES)

    Rack.before["one"] = fail
    for verb in ("stat", "scrub"):
        done = run(verb, rack, status=None)
        assert done.status and "EVIL" in done.out + done.err and not acts(done.out + done.err)


@pytest.mark.parametrize(
    "content",
    [
        b'{"identity": {}, "spec": {"model": [1]}}',
        b"[" * 100_000,
        b"[" * 1_000_000,
        b'{"a":' * 50_000,
        b"{",
        b"\xff",
        b'{"spec": 3}',
    ],
)
def test_a_record_that_is_none_is_passed_over(rack: Path, content: bytes) -> None:
    fill(rack, 2)
    Rack.racks["one"][f"spec/{'ab' * 16}.json"] = content
    for verb in ("stat", "scrub"):
        done = run(verb, rack)
        assert SPEC.model in done.out or verb == "scrub"
    (own,) = [key.removeprefix("spec/")[:8] for key in Rack.racks["one"] if "abab" not in key and key[:5] == "spec/"]
    assert "the tiers have records of no other" in run("why", rack, "--fingerprint", own).out


def test_a_record_that_is_too_long_is_not_read(rack: Path) -> None:
    fill(rack, 2)
    long = f"spec/{'ab' * 16}.json"
    Rack.racks["one"][long] = json.dumps({"identity": {}, "spec": {"model": "x" * 70_000}}).encode()
    read: list[str] = []
    Rack.before["one"] = lambda verb, key: read.append(key) if verb == "get" else None
    done = run("stat", rack)
    assert SPEC.model in done.out and "kvloom: tier rack: 1 records of models are not read" in done.err
    assert run("stat", rack, "--json").json[0]["records_left_out"] == 1
    (own,) = [key.removeprefix("spec/") for key in Rack.racks["one"] if key != long and key.startswith("spec/")]
    assert "1 records of models are not read" in run("why", rack, "--fingerprint", own[:8]).err
    assert long not in read and read


@given(st.text())
def test_plain_text_stays_and_nothing_else_does(text: str) -> None:
    shown = output.plain(text)
    assert not acts(shown)
    if not acts(text) and not {"\u2028", "\u2029"} & set(text):
        assert shown == text
    shown.encode("utf-8")
