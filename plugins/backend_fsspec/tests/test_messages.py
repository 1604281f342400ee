"""Error messages for settings that cannot work."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvloom_backend_fsspec.backend import FsspecBackend
from kvloom_backend_fsspec.errors import explained


def test_times_have_units() -> None:
    config = FsspecBackend.Config(url="s3://bucket/kv", timeout="5s", connect_timeout="250ms")
    assert (config.timeout, config.connect_timeout) == (5.0, 0.25)


@pytest.mark.parametrize("bucket", ["bu cket", "bucket:9000", "b*cket", "x" * 256])
def test_a_bucket_that_s3_cannot_have(bucket: str) -> None:
    with pytest.raises(ValidationError, match="names no bucket that S3 has"):
        FsspecBackend.Config(url=f"s3://{bucket}/kv")


def test_a_scheme_that_nothing_serves() -> None:
    with pytest.raises(ValueError, match="nothing serves nope://"):
        FsspecBackend(FsspecBackend.Config(url="nope://host/kv"))


@pytest.mark.parametrize(
    ("text", "s3", "webdav"),
    [
        ("301 Moved Permanently, Redirect response", "set `options: {region: ...}`", "where it redirects to"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED]", "{root_certificate: ca.pem}", "{verify: ca.pem}"),
        ("[SSL: WRONG_VERSION_NUMBER]", "is `endpoint` right?", "set `allow_http: true`"),
        ("Connection refused", "is it up", "is it up"),
    ],
)
def test_a_remedy_is_one_of_the_scheme(text: str, s3: str, webdav: str) -> None:
    for url, remedy in (("s3://bucket/kv", s3), ("webdav://host/kv", webdav)):
        assert remedy in explained(OSError(text), FsspecBackend.Config(url=url).place)
