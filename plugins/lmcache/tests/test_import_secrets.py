"""`kvloom config import` lets no password through: not to the file, not to stdout or stderr, not into an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvloom import ConfigError, EngineConfig
from kvloom.cli.main import app
from kvloom_lmcache import import_config
from kvloom_lmcache.addresses import address, bucket

APP = app()
SECRET = "Geh3imnis"
REDIS = {"type": "redis", "password": "${env:REDIS_PASSWORD}", "serializer": "raw"}


def invoke(fields: dict[str, Any], tmp_path: Path, *arguments: str) -> tuple[Any, str]:
    """The result of the command, and everything that it said, wrote or raised."""
    file, out = tmp_path / "lmcache.yaml", tmp_path / "kv.yaml"
    file.write_text(yaml.safe_dump(fields))
    base, json_too = ["config", "import", str(file), *arguments], ["--json", "-o", str(out)]
    results = [CliRunner().invoke(APP, [*base, *more]) for more in ([], json_too)]
    said = "".join(f"{one.output}{one.stderr}{one.exception}" for one in results)
    return results[0], said + (out.read_text() if out.exists() else "")


@pytest.mark.parametrize(
    ("url", "tier", "variables"),
    [
        (f"redis://:{SECRET}@h:6379", {**REDIS, "url": "redis://h:6379"}, ["REDIS_PASSWORD"]),
        (f"redis://u:{SECRET}@h:6379/2", {**REDIS, "url": "redis://h:6379/2", "username": "u"}, ["REDIS_PASSWORD"]),
        (f"redis://u:{SECRET}%40x@h", {**REDIS, "url": "redis://h", "username": "u"}, ["REDIS_PASSWORD"]),
        (f"redis://:a@{SECRET}@h:1", {**REDIS, "url": "redis://h:1"}, ["REDIS_PASSWORD"]),
        (f"REDIS://:{SECRET}@h:1", {**REDIS, "url": "redis://h:1"}, ["REDIS_PASSWORD"]),
        (f"rediss://:{SECRET}@h:1", {**REDIS, "url": "rediss://h:1"}, ["REDIS_PASSWORD"]),
        (f"valkey://:{SECRET}@[::1]:1", {**REDIS, "url": "redis://[::1]:1"}, ["REDIS_PASSWORD"]),
        (f"lm://:{SECRET}@h:1", {**REDIS, "url": "redis://h:1"}, ["REDIS_PASSWORD"]),
        (f"redis://h:1?db=3&password={SECRET}", {**REDIS, "url": "redis://h:1/3"}, ["REDIS_PASSWORD"]),
        (f"redis-sentinel://:{SECRET}@a:1,b:2/m", {**REDIS, "url": "redis+sentinel://a:1,b:2/m"}, ["REDIS_PASSWORD"]),
        (
            f"s3://AKIA1:{SECRET}@bucket/kv",
            {"type": "fsspec", "url": "s3://bucket/kv", "serializer": "raw"},
            ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"],
        ),
        (
            f"gs://u:{SECRET}@bucket",
            {"type": "fsspec", "url": "gs://bucket", "serializer": "raw"},
            ["GOOGLE_APPLICATION_CREDENTIALS"],
        ),
        (
            f"az://account:{SECRET}@box",
            {"type": "fsspec", "url": "az://box", "serializer": "raw"},
            ["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"],
        ),
        (f"fs://u:{SECRET}@h:0/kv", {"type": "fsspec", "url": "file:///kv", "serializer": "raw"}, []),
        (f"mooncakestore://u:{SECRET}@m:5/", {"type": "mooncake", "master": "m:5", "serializer": "raw"}, []),
    ],
)
def test_a_password_in_a_url_becomes_a_variable(
    url: str, tier: dict[str, Any], variables: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, said = invoke({"local_cpu": False, "remote_url": url}, tmp_path)
    assert result.exit_code == 0 and SECRET not in said and "AKIA1" not in said
    assert yaml.safe_load((tmp_path / "kv.yaml").read_text())["tiers"] == [tier]
    for name in variables:
        assert f"# Set {name}: the " in result.stdout and f"  {name}: the " in result.stderr
        monkeypatch.setenv(name, SECRET)
    loaded = EngineConfig.from_file(tmp_path / "kv.yaml").tiers[0].model_extra or {}
    assert loaded.get("password", SECRET) == SECRET


@pytest.mark.parametrize(
    "url",
    [
        f"{SECRET}@h:1", f"u:{SECRET}@h:1", f"redis:{SECRET}@h", f"redis://{SECRET}@h:1", f"redis://u:{SECRET}/x@h:1",
        f"redis://u:{SECRET}#x@h:1", f"redis://u:a?{SECRET}@h:1", f"redis://:{SECRET}@a:1,:{SECRET}@b:2",
        f"s3://AKIA:{SECRET}/x@bucket", f"s3://AK/IA:{SECRET}@bucket", f"redis://u:{SECRET}@[h", f"//u:{SECRET}@h",
        f"redis://u:{SECRET}\u2100@h:1", [f"redis://:{SECRET}@h"], {"url": f"redis://:{SECRET}@h"},
    ],
)  # fmt: skip
def test_where_a_login_cannot_be_told_apart_it_is_an_error_that_quotes_nothing(url: Any, tmp_path: Path) -> None:
    result, said = invoke({"remote_url": url}, tmp_path)
    assert isinstance(result.exception, ConfigError) and str(result.exception).startswith("remote_url: ")
    assert SECRET not in said and "\n" not in str(result.exception) and not (tmp_path / "kv.yaml").exists()


@pytest.mark.parametrize(
    ("remote", "extra", "settings", "variables"),
    [
        ("redis://h:1", {"redis_password": SECRET}, {"password": "${env:REDIS_PASSWORD}"}, ["REDIS_PASSWORD"]),
        (
            "valkey://h:1",
            {"valkey_username": "u", "valkey_password": SECRET},
            {"username": "u", "password": "${env:REDIS_PASSWORD}"},
            ["REDIS_PASSWORD"],
        ),
        (
            "s3://b/kv",
            {"aws_access_key_id": "AKIA1", "aws_secret_access_key": SECRET},
            {},
            ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"],
        ),
        (
            "mooncakestore://m:1",
            {"metadata_server": f"http://u:{SECRET}@h:8080/metadata"},
            {"metadata": "http://u:${env:MOONCAKE_METADATA_PASSWORD}@h:8080/metadata"},
            ["MOONCAKE_METADATA_PASSWORD"],
        ),
    ],
)
def test_secrets_of_extra_config_become_variables(
    remote: str, extra: dict[str, str], settings: dict[str, str], variables: list[str], tmp_path: Path
) -> None:
    result, said = invoke({"local_cpu": False, "remote_url": remote, "extra_config": extra}, tmp_path, "--strict")
    assert result.exit_code == 0 and SECRET not in said and "AKIA1" not in said
    tier = yaml.safe_load((tmp_path / "kv.yaml").read_text())["tiers"][0]
    assert {
        name: value for name, value in tier.items() if name not in ("type", "url", "master", "serializer")
    } == settings
    assert [name for name in variables if f"  {name}: " in result.stderr] == variables


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_config": {"some_password": SECRET, "nested": {"deep": [SECRET]}}},
        {"extra_config": SECRET},
        {"controller_url": f"tcp://u:{SECRET}@h", "audit_actual_remote_url": f"redis://:{SECRET}@h"},
        {"remote_url": f"infinistore://u:{SECRET}@h:1"},
        {"enable_p2p": True, "lookup_url": f"redis://:{SECRET}@h:1"},
        {"enable_p2p": True, "lookup_url": f"mooncake://u:{SECRET}@h:1"},
        {"chunk_size": SECRET},
        {"no_field_of_lmcache": SECRET},
        {"remote_url": f"redis://h:1?ssl_key={SECRET}"},
    ],
)
def test_what_has_no_place_is_not_shown_either(fields: dict[str, Any], tmp_path: Path) -> None:
    assert SECRET not in invoke(fields, tmp_path)[1]


@settings(max_examples=25, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=6), st.text(st.characters(codec="utf-8"), max_size=6))
def test_no_password_that_a_url_can_hold_gets_through(before: str, after: str) -> None:
    try:
        done = import_config({"local_cpu": False, "remote_url": f"redis://user:{before}{SECRET}{after}@h:6379/0"})
        said = json.dumps([done.config, done.environment, [row.text for row in done.rows]])
    except ConfigError as error:
        said = str(error)
    assert SECRET not in said


def test_what_looks_like_a_variable_is_text() -> None:
    done = import_config({"lmcache_instance_id": "a${env:HOME}", "local_disk": "/kv/${x}", "chunk_size": 8})
    loaded = EngineConfig.load(done.config)
    assert loaded.instance_id == "a${env:HOME}" and (loaded.tiers[1].model_extra or {})["path"] == "/kv/${x}"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://b.s3.us-east-1.amazonaws.com/kv", ("s3://b/kv", "us-east-1", "")),
        ("s3://my.b.s3express-use1-az4.us-east-1.amazonaws.com", ("s3://my.b", "us-east-1", "")),
        ("s3://localhost:9000/bench/kv", ("s3://bench/kv", "", "localhost:9000")),
        ("s3://kv-01.10.0.0.7:8111", ("s3://kv-01", "", "10.0.0.7:8111")),
        ("s3://bucket/kv", ("s3://bucket/kv", "", "")),
    ],
)
def test_lmcaches_names_for_buckets(url: str, expected: tuple[str, str, str]) -> None:
    assert bucket(address(url, field="remote_url")) == expected


def test_a_server_like_s3s_is_an_endpoint() -> None:
    extra = {"s3_region": "us", "disable_tls": True, "save_chunk_meta": False, "s3_num_io_threads": 320}
    done = import_config({"local_cpu": False, "remote_url": "s3://localhost:9000/bench", "extra_config": extra})
    assert done.complete and done.config["tiers"] == [
        {
            "type": "fsspec", "url": "s3://bench", "options": {"endpoint": "http://localhost:9000", "region": "us"},
            "serializer": "raw", "allow_http": True,
        }
    ]  # fmt: skip
