"""URLs, options and what is said about those that cannot work. Nothing here has a server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom import ConfigError, Engine, EngineConfig, KVSpec, Registry
from kvloom.config import resolve
from kvloom_backend_fsspec.backend import ExclusiveFsspecBackend, FsspecBackend, ProcessFsspecBackend
from kvloom_backend_fsspec.config import Config, Place, place_of
from kvloom_backend_fsspec.stores import obstore_client


def problem(**settings: Any) -> str:
    """The error for a tier with these settings."""
    config = EngineConfig.load({"tiers": ["memory", {"type": "fsspec", **settings}]})
    with pytest.raises(ConfigError) as caught:
        resolve(config, Registry.discover())
    return str(caught.value)


def test_it_is_found_by_its_entry_point() -> None:
    assert Registry.discover().get("backend", FsspecBackend.type) is FsspecBackend


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket", Place("s3", "bucket", "")),
        ("s3://bucket/", Place("s3", "bucket", "")),
        ("s3://bucket/a/b/", Place("s3", "bucket", "a/b")),
        ("gs://bucket/a b/%2e%2e/c#d?e", Place("gs", "bucket", "a b/%2e%2e/c#d?e")),
        ("file:///srv/kv", Place("file", "", "srv/kv")),
        ("memory://kv/x", Place("memory", "", "kv/x")),
        ("sftp://user@host:22/srv/kv", Place("sftp", "user@host:22", "srv/kv")),
    ],
)
def test_a_url_names_a_place_literally(url: str, place: Place) -> None:
    assert place_of(url) == place


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "not a URL; expected scheme://bucket/prefix"),
        ("bucket/prefix", "not a URL"),
        ("S3:bucket", "not a URL"),
        ("s3://", "names no bucket or host; expected s3://bucket/prefix"),
        ("s3:///prefix", "names no bucket or host"),
        ("file:///", "names no path; expected file:///path"),
        ("file://srv/kv", "file://srv/... names a host; write three slashes"),
        ("s3://bucket/a/../b", "an empty part, `.` or `..`"),
        ("s3://bucket/a//b", "an empty part, `.` or `..`"),
        ("s3://bucket/..", "an empty part, `.` or `..`"),
        ("s3://bucket?versionId=3", "takes no query"),
        ("s3://bucket/a\nb", "a control character"),
    ],
)
def test_a_url_that_names_no_place(url: str, said: str) -> None:
    told = problem(url=url)
    assert told.startswith("tiers.1.url: ") and said in told


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    told = problem(url="sftp://user:hunter2@host/kv")
    assert "has a password in it; credentials come from the standard places only" in told
    assert "hunter2" not in told


@pytest.mark.parametrize(
    "name",
    ["secret_access_key", "aws_access_key_id",
     "AWS_SESSION_TOKEN", "account_key", "sas_key", "password", "key", "secret",
     "token", "connection_string", "service_account_key", "client-secret", "auth"],
)  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_secrets_are_refused_by_name_and_not_repeated(name: str, nested: bool) -> None:
    options: dict[str, Any] = {name: "hunter2"}
    told = problem(url="s3://bucket/kv", options={"client_kwargs": [options]} if nested else options)
    assert told.startswith("tiers.1.options: ") and f"{name} is refused: credentials come from" in told
    assert "hunter2" not in told


@pytest.mark.parametrize("name", ["region", "endpoint", "skip_signature", "service_account_path", "token_file", "anon"])
def test_what_is_no_secret_passes(name: str) -> None:
    value = "https://x" if name == "endpoint" else "x"
    assert Config(url="s3://bucket/kv", options={name: value}).options == {name: value}


@pytest.mark.parametrize("name", ["endpoint", "endpoint_url", "aws_endpoint"])
def test_an_endpoint_without_tls_has_to_be_allowed(name: str) -> None:
    options = {name: "HTTP://127.0.0.1:9000"}
    assert f"options.{name}: has no TLS" in problem(url="s3://bucket/kv", options=options)
    assert Config(url="s3://bucket/kv", options=options, allow_http=True).allow_http


def test_obstore_where_it_has_no_such_scheme() -> None:
    assert "obstore has no webdav://; use `driver: auto`" in problem(url="webdav://host/kv", driver="obstore")


@pytest.mark.parametrize("settings", [{"timeout": 0}, {"retries": -1}, {"threads": 0}, {"capacities": 3}])
def test_settings_that_make_no_sense(settings: dict[str, Any]) -> None:
    assert f"tiers.1.{next(iter(settings))}" in problem(url="s3://bucket/kv", **settings)


def opened(**settings: Any) -> FsspecBackend:
    return FsspecBackend(FsspecBackend.Config(**settings))


def test_options_that_the_store_does_not_have() -> None:
    with pytest.raises(ValueError, match=r"^options: .*colour"):
        opened(url="s3://bucket/kv", options={"colour": "blue"})
    with pytest.raises(ValueError, match=r"^options: file:// has none; remove colour"):
        opened(url="file:///srv/kv", options={"colour": "blue"})


def test_fsspecs_own_sftp_is_not_offered() -> None:
    assert "use `driver: auto`" in problem(url="sftp://host/kv", driver="fsspec")


def test_a_scheme_that_nobody_serves() -> None:
    with pytest.raises(ValueError, match=r"^url: nothing serves carrier-pigeon://"):
        opened(url="carrier-pigeon://loft/kv")


@pytest.mark.parametrize(
    ("scheme", "module", "extra"),
    [("sftp", "paramiko", "sftp"), ("webdav", "webdav4", "webdav"), ("abfs", "adlfs", "az")],
)
def test_a_missing_extra_is_named(scheme: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ImportError, match=rf"pip install \S*backend.fsspec\[{extra}\]'"):
        opened(url=f"{scheme}://host/kv")


def test_what_a_scheme_claims() -> None:
    kinds = {"file:///srv/kv": ExclusiveFsspecBackend, "memory://kv": ProcessFsspecBackend}
    assert {url: type(opened(url=url)) for url in kinds} == kinds
    assert type(opened(url="file:///srv/kv", driver="fsspec")) is FsspecBackend
    assert (ProcessFsspecBackend.persistent, ProcessFsspecBackend.shared, FsspecBackend.bounded) == (
        False,
        False,
        False,
    )


def test_opening_asks_nothing_of_the_store() -> None:
    backend = opened(url="s3://bucket/kv", options={"endpoint": "https://127.0.0.1:1"})
    backend.close()
    backend.close()


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"^url: cannot write: file://.*, or set `write: never`"):
        opened(url=f"file://{tmp_path}/file/kv").check_writable()


@pytest.mark.parametrize("driver", ["obstore", "fsspec"])
def test_one_place_has_one_identity(tmp_path: Path, driver: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    same = {opened(url=f"file://{tmp_path}{end}", driver=driver).identity() for end in ("/kv", "/kv/", "/link/kv")}
    assert len(same) == 1
    assert opened(url=f"file://{tmp_path}/other", driver=driver).identity() not in same


def test_one_bucket_has_one_identity_for_each_endpoint() -> None:
    def identity(url: str, endpoint: str) -> str | None:
        return opened(url=url, options={"endpoint": endpoint, "skip_signature": "true"}).identity()

    one = identity("s3://bucket/kv", "https://one")
    assert one == identity("s3a://bucket/kv/", "https://one/")
    assert one not in (identity("s3://bucket/kv", "https://two"), identity("s3://bucket/kv2", "https://one"))


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_text_is_a_place_or_a_value_error(text: str) -> None:
    for url in (text, f"s3://{text}", f"s3://bucket/{text}"):
        try:
            place = place_of(url)
        except ValueError:
            continue
        assert not {"", ".", ".."} & set(place.prefix.split("/") if place.prefix else [])


def test_neither_importing_nor_checking_a_configuration_loads_a_client() -> None:
    code = (
        "import sys, kvloom_backend_fsspec.config as c\n"
        "c.Config(url='s3://bucket/kv')\n"
        "assert not {'obstore', 'fsspec', 'torch', 'boto3'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_in_options_begin_where_the_configuration_is(tmp_path: Path) -> None:
    options = {"known_hosts": "hosts", "key_filename": ["a", "/b"], "endpoint": "https://c"}
    config = FsspecBackend.Config.model_validate(
        {"url": "sftp://host/kv", "options": options}, context={"directory": tmp_path}
    )
    assert config.options == {
        "known_hosts": f"{tmp_path}/hosts", "key_filename": [f"{tmp_path}/a", "/b"], "endpoint": "https://c",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "google_service_account", "service_account_path", "aws_web_identity_token_file", "federated_token_file",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "verify",
    ],
)  # fmt: skip
def test_files_of_the_clients_begin_there_too(tmp_path: Path, name: str) -> None:
    settings = {"url": "s3://bucket/kv", "options": {name: "one"}}
    config = FsspecBackend.Config.model_validate(settings, context={"directory": tmp_path})
    assert config.options == {name: f"{tmp_path}/one"}


def test_what_is_no_certificate_is_neither_read_whole_nor_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore_client, "_MOST_CERTIFICATE_BYTES", 1000)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    for name in ("fifo", "sparse"):
        with pytest.raises(ConfigError) as told:
            obstore_client._root_certificate({"root_certificate": str(tmp_path / name)})
        assert str(told.value) == (f"options.root_certificate: {tmp_path}/{name} is empty, or has more than 1000 bytes")


def test_files_in_the_home_directory_are_named_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    options = {"known_hosts": "~/hosts", "key_filename": ["~/a", "~/b"], "root_certificate": "~", "verify": "~/ca"}
    config = FsspecBackend.Config.model_validate(
        {"url": "sftp://host/kv", "options": options}, context={"directory": Path("/elsewhere")}
    )
    assert config.options == {
        "known_hosts": f"{tmp_path}/hosts", "key_filename": [f"{tmp_path}/a", f"{tmp_path}/b"],
        "root_certificate": str(tmp_path), "verify": f"{tmp_path}/ca",
    }  # fmt: skip


@pytest.mark.parametrize("value", [None, True, False])
def test_certificates_need_no_file(value: bool | None) -> None:
    config = FsspecBackend.Config(url="webdav://host/kv", options={"verify": value, "cert": None})
    config.check_files()
    assert config.options == {"verify": value, "cert": None}


@pytest.mark.parametrize(
    "options",
    [
        {"root_certificate": 5}, {"root_certificate": ["ca.pem"]}, {"root_certificate": ""}, {"known_hosts": ["a"]},
        {"known_hosts": True}, {"key_filename": [5]}, {"key_filename": {"a": "b"}}, {"verify": 1}, {"verify": ["a"]},
        {"cert": ["cert", "key", "hush"]}, {"google_service_account": False}, {"AZURE_FEDERATED_TOKEN_FILE": 0},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_path_is_refused_and_not_repeated(options: dict[str, Any]) -> None:
    said = problem(url="gs://bucket/kv", options=options)
    assert (
        said.startswith(f"tiers.1.options: {next(iter(options))}: expected the path of a file") and "hush" not in said
    )


FILES = pytest.mark.parametrize(
    ("url", "name", "several"),
    [
        ("webdav://host/kv", "verify", False), ("webdav://host/kv", "cert", False), ("webdav://host/kv", "cert", True),
        ("gs://bucket/kv", "google_service_account", False), ("s3://bucket/kv", "aws_web_identity_token_file", False),
        ("az://box/kv", "azure_federated_token_file", False), ("s3://bucket/kv", "root_certificate", False),
        ("sftp://host/kv", "key_filename", False), ("sftp://host/kv", "key_filename", True),
        ("sftp://host/kv", "known_hosts", False),
    ],
)  # fmt: skip


def refused(url: str, name: str, value: object) -> str:
    """The error at opening an engine whose tier has this option."""
    block = {"type": "fsspec", "url": url, "options": {name: value}}
    with pytest.raises(ConfigError) as told:
        Engine.open({"tiers": [block]}, KVSpec("m", num_layers=1, num_kv_heads=1, head_size=8, dtype="float16"))
    return str(told.value)


@FILES
def test_files_that_cannot_be_read_are_named(tmp_path: Path, url: str, name: str, several: bool) -> None:
    """Clients would wait for what comes from a FIFO."""
    os.mkfifo(tmp_path / "fifo")
    for path, problem in (
        ("~nobody-of-that-name/file", "unknown home directory: {}; name a file"),
        (f"{tmp_path}/missing", "there is no file {}"),
        (f"{tmp_path}/{'x' * 300}", "cannot read {}: File name too long"),
        (f"{tmp_path}/fifo", "{} is not a regular file"),
    ):
        said = refused(url, name, [path] if several else path)
        assert said == f"tiers.0.options.{name}: {problem.format(path)}"
    if name != "verify":
        said = refused(url, name, [str(tmp_path)] if several else str(tmp_path))
        assert said == f"tiers.0.options.{name}: {tmp_path} is not a regular file"


def test_certificates_may_be_a_directory(tmp_path: Path) -> None:
    FsspecBackend.Config(url="webdav://host/kv", options={"verify": str(tmp_path)}).check_files()
