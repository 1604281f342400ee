"""Opening on a real S3 server that does not do what is asked for: errors at start that say what to do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvloom import ConfigError, Engine, KVSpec
from kvloom_backend_fsspec.testing import CephRGW, s3_client
from kvloom_testkit.faults import refusing_port

SPEC = KVSpec(model="tiny", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16")
READER, READER_SECRET = "READER", "reader-secret"


@pytest.fixture(scope="module")
def bucket(rgw: CephRGW, new_bucket: Callable[..., str]) -> str:
    return new_bucket(rgw)


def refused(url: str, endpoint: str, *, options: dict[str, Any] | None = None, **settings: Any) -> str:
    """The error when an engine is opened."""
    tier = {"type": "fsspec", "url": url, "options": {"endpoint": endpoint, **(options or {})}, **settings}
    with pytest.raises(ConfigError) as caught:
        Engine.open({"connector": "plain", "tiers": ["memory", tier]}, SPEC).close()
    return str(caught.value)


def test_a_bucket_that_is_not_there(rgw: CephRGW) -> None:
    said = refused("s3://no-such-bucket/kv", rgw.endpoint, allow_http=True)
    assert said.startswith("tiers.1: url: cannot write: s3://no-such-bucket: ") and "NoSuchBucket" in said
    assert "make it, or name another one in `url`" in said


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials(rgw: CephRGW, bucket: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "quite-something-else")
    said = refused(f"s3://{bucket}/kv", rgw.endpoint, allow_http=True)
    assert "the credentials are not the store's" in said
    assert "quite-something-else" not in said


def test_nobody_is_there(bucket: str) -> None:
    with refusing_port() as port:
        said = refused(f"s3://{bucket}/kv", f"http://127.0.0.1:{port}", allow_http=True)
    assert "it cannot be reached: is it up, and are host and port right?" in said


def test_tls_where_there_is_none(rgw: CephRGW, bucket: str) -> None:
    said = refused(f"s3://{bucket}/kv", f"https://127.0.0.1:{rgw.port}")
    assert "it does not speak TLS" in said


def test_a_certificate_that_nobody_vouches_for(rgw: CephRGW, bucket: str) -> None:
    endpoint = f"https://127.0.0.1:{rgw.tls_port}"
    assert "its certificate is not trusted" in refused(f"s3://{bucket}/kv", endpoint)


def test_with_tls_and_an_authority_of_ones_own(rgw: CephRGW, bucket: str, s3: Any) -> None:
    options = {"root_certificate": str(rgw.authority)}
    backend = s3(f"https://127.0.0.1:{rgw.tls_port}", bucket, options=options)
    backend.check_writable()
    backend.put("key", [b"blob"])
    assert backend.get("key") == b"blob"
    backend.close()


def test_a_server_that_does_not_answer_is_not_waited_for_long(rgw: CephRGW, bucket: str) -> None:
    rgw.freeze()
    try:
        began = time.monotonic()
        said = refused(f"s3://{bucket}/kv", rgw.endpoint, allow_http=True, timeout=1)
        assert time.monotonic() - began < 20, "obstore's own defaults wait for minutes"
    finally:
        rgw.thaw()
    assert "it did not answer in time" in said


@pytest.fixture(scope="module")
def reader(rgw: CephRGW, bucket: str) -> str:
    """A user who may read and list this bucket, and nothing else."""
    rgw.add_user(READER, READER_SECRET)
    allow = {
        "Effect": "Allow",
        "Principal": {"AWS": [f"arn:aws:iam:::user/{READER}"]},
        "Action": ["s3:GetObject", "s3:ListBucket"],
        "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"],
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allow]})
    s3_client(rgw.endpoint).put_bucket_policy(Bucket=bucket, Policy=policy)
    return READER


def test_who_may_only_read_is_told_so_and_reads(
    rgw: CephRGW, bucket: str, reader: str, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = s3(rgw, bucket)
    writer.put("key", [b"blob"])
    writer.close()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_SECRET)
    said = refused(f"s3://{bucket}/kv", rgw.endpoint, allow_http=True)
    assert "no right to do this" in said and "`write: never`" in said
    backend = s3(rgw, bucket)
    assert backend.get("key") == b"blob" and backend.contains("key") and not backend.contains("other")
    assert [entry.key for entry in backend.scan()] == ["key"]
    backend.close()
    tier = {"type": "fsspec", "url": f"s3://{bucket}/kv", "options": {"endpoint": rgw.endpoint}, "write": "never"}
    Engine.open({"connector": "plain", "tiers": ["memory", {**tier, "allow_http": True}]}, SPEC).close()
