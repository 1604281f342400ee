"""Opening: what is asked for, what the system offers, and what is said about it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest

from kvloom import ConfigError, EngineConfig, Registry
from kvloom.config import resolve
from kvloom_backend_disk.backend import DiskBackend

KEY = f"{'0a' * 16}/-/7-{'3f' * 32}"


def test_it_is_found_by_its_entry_point() -> None:
    assert Registry.discover().get("backend", DiskBackend.type) is DiskBackend
    assert (DiskBackend.type, DiskBackend.persistent, DiskBackend.shared, DiskBackend.bounded) == (
        "disk",
        True,
        True,
        False,
    )


def test_torch_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys, kvloom_backend_disk.backend as b\n"
        f"d = b.DiskBackend(b.DiskBackend.Config(path={str(tmp_path)!r})); d.put('a', [b'x']); d.get('a'); d.close()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hits_survive_reopening(tmp_path: Path, open_backend: Any) -> None:
    backend = open_backend(tmp_path)
    backend.put(KEY, [b"blob"])
    backend.close()
    backend.close()
    assert open_backend(tmp_path).get(KEY) == b"blob"


def test_the_home_directory_and_missing_parents(tmp_path: Path, open_backend: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    backend = open_backend(Path("~/a/b"))
    backend.put(KEY, [b"blob"])
    assert (tmp_path / "a/b").is_dir()


def test_a_relative_path_stays_where_it_was(tmp_path: Path, open_backend: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    backend = open_backend(Path("store"))
    backend.put(KEY, [b"blob"])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert backend.get(KEY) == b"blob"


def test_a_path_that_cannot_be_written_to(tmp_path: Path, open_backend: Any) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"^path: cannot write to .*file/store: Not a directory; name a directory"):
        open_backend(tmp_path / "file/store")


def test_nobodys_home_directory(open_backend: Any) -> None:
    with pytest.raises(ValueError, match=r"^path: unknown home directory: ~no-such-user/store; name a directory"):
        open_backend(Path("~no-such-user/store"))


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "empty; name a directory"),
        ("  ", "empty; name a directory"),
        ("${env:KV_DIRECTORY}", "empty; name a directory"),
        ("a\0b", "has a NUL character in it; name a directory without one"),
    ],
)
def test_a_path_that_names_nothing_is_refused_where_it_stands(path: str, problem: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("KV_DIRECTORY", "")
    config = EngineConfig.load({"tiers": ["memory", {"type": "disk", "path": path}]})
    with pytest.raises(ConfigError) as caught:
        resolve(config, Registry.discover())
    assert str(caught.value) == f"tiers.1.path: {problem}"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission(tmp_path: Path, open_backend: Any) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(ValueError, match=r"Permission denied; name a directory .*, or set `write: never`"):
        open_backend(tmp_path).check_writable()
    tmp_path.chmod(0)
    with pytest.raises(ValueError, match="Permission denied"):
        open_backend(tmp_path)
    tmp_path.chmod(stat.S_IRWXU)


@pytest.mark.parametrize("settings", [{}, {"path": "x", "direct": "sometimes"}, {"path": "x", "capacity": 1}])
def test_settings_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        DiskBackend.Config(**settings)


def test_nothing_is_said_where_all_is_well(direct_path: Path, open_backend: Any, infos: Any) -> None:
    open_backend(direct_path)
    open_backend(direct_path, "never")
    assert infos.text == ""


def test_a_system_without_o_direct(tmp_path: Path, open_backend: Any, infos: Any, monkeypatch: Any) -> None:
    for name in ("O_DIRECT", "RWF_NOWAIT", "posix_fadvise", "preadv", "pwritev", "preadv2"):
        monkeypatch.delattr(os, name, raising=False)
    backend = open_backend(tmp_path)
    assert "this system has no O_DIRECT" in infos.text
    blob = os.urandom(300_000)
    backend.put(KEY, [blob])
    into = bytearray(1000)
    assert backend.get(KEY) == blob
    assert backend.get_range(KEY, 777, memoryview(into)) and into == blob[777:1777]
    with pytest.raises(ValueError, match="direct: O_DIRECT does not work"):
        open_backend(tmp_path, "always")
