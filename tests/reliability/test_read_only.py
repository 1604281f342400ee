"""A directory that this process may read and not write to: enough for who only reads, refused where it is written."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import only_reading
import pytest
from children_support import forked
from only_reading import KV, SPEC, TOKENS, config

from kvloom import ConfigError, Engine


@pytest.fixture
def store() -> Iterator[Path]:
    """A directory of this user's with two blobs in it, which everybody may read and nobody may write to."""
    above = Path(tempfile.mkdtemp())
    above.chmod(0o755)
    path = above / "kv"
    with Engine.open(config(str(path)), SPEC) as engine:
        engine.store(TOKENS, kv=KV)
    for folder, _, files in os.walk(path):
        os.chmod(folder, 0o555)
        for name in files:
            os.chmod(Path(folder, name), 0o444)
    yield path
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o755)
    shutil.rmtree(above)


def as_nobody(what: str, path: Path) -> Any:
    """The output of `only_reading.py`, run as a user whom permissions restrict."""
    done = forked(lambda: only_reading.main(what, str(path)))
    assert not done.status, done.err
    return json.loads(done.out)


def test_who_only_reads_gets_all_there_is(store: Path) -> None:
    assert as_nobody("read", store) == [[True, True, True, []]] * 2


def test_an_index_asks_a_directory_that_it_may_not_write_to(store: Path) -> None:
    assert as_nobody("ask", store) == TOKENS.numel()


def test_a_tier_that_is_written_to_is_refused(store: Path) -> None:
    assert as_nobody("write", store) == (
        f"tiers.1: path: cannot write to {store}: Permission denied; name a directory that this user may create or "
        "write to, or set `write: never` to only read it"
    )


def test_a_directory_that_may_not_be_read_either_is_refused(store: Path) -> None:
    store.chmod(0)
    said = as_nobody("ask", store)
    assert said.startswith(f"tiers.1: path: cannot write to {store}: Permission denied; name a directory")


@pytest.mark.parametrize("how", ["..", "link", "direct"])
def test_two_tiers_in_one_directory_are_refused_whatever_they_call_it(tmp_path: Path, how: str) -> None:
    path = tmp_path / "kv"
    (tmp_path / "link").symlink_to(path)
    other: dict[str, Any] = {
        "..": {"path": str(tmp_path / "x" / ".." / "kv")},
        "link": {"path": str(tmp_path / "link")},
        "direct": {"path": str(path), "direct": "never"},
    }[how]
    source = config(str(path))
    source["tiers"].append({"type": "disk", "name": "other", **other})
    path.mkdir()
    with pytest.raises(ConfigError) as caught:
        Engine.open(source, SPEC)
    assert str(caught.value) == (
        "tiers.2: 'other' would be on the same store as tiers.1, 'disk'; give it other settings, or remove one"
    )
    source["tiers"][2]["path"] = str(tmp_path / "elsewhere")
    Engine.open(source, SPEC).close()
