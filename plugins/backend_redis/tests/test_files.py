"""A file that TLS needs and that cannot be used is said by the setting that names it, before anything is connected."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from kvloom import ConfigError
from kvloom_backend_redis import testing
from kvloom_backend_redis.backend import RedisBackend


@pytest.mark.parametrize("name", ["tls_ca", "tls_cert", "tls_key"])
@pytest.mark.parametrize("content", [None, "no certificate"])
def test_files_of_tls(tmp_path: Path, name: str, content: str | None) -> None:
    there = tmp_path / "there.pem"
    there.write_text("no certificate")
    path = tmp_path / "file.pem"
    if content is not None:
        path.write_text(content)
    settings: dict[str, Path] = {"tls_ca": path} if name == "tls_ca" else {"tls_cert": there, "tls_key": there}
    config = RedisBackend.Config(url="rediss://127.0.0.1:1", **{**settings, name: path})
    with pytest.raises(ConfigError) as caught:
        RedisBackend(config)
    assert caught.value.path == ("tls_key" if name == "tls_cert" and content else name)
    assert str(path if content is None else tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["tls_ca", "tls_cert", "tls_key"])
def test_what_is_no_file_of_tls_is_neither_read_nor_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    for path in (tmp_path / "fifo", tmp_path / "sparse"):
        there = {} if name == "tls_ca" else {"tls_cert": Path(__file__), "tls_key": Path(__file__)}
        config = RedisBackend.Config(url="rediss://127.0.0.1:1", **{**there, name: path})
        with pytest.raises(ConfigError, match=f"cannot read {path}: it is not a file, or has more") as caught:
            RedisBackend(config)
        assert caught.value.path == name


@pytest.mark.parametrize("server", [testing.RedisServer, testing.RedisCluster])
def test_a_server_that_does_not_start_leaves_no_directory(
    server: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(testing, "binary", lambda name: str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError), server():
        pass
    assert not [*tmp_path.iterdir()]
