"""Error messages for settings that cannot work."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvloom_backend_fsspec.backend import FsspecBackend


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
