"""An endpoint is a URL; what is none is refused before a client makes something of it."""

from __future__ import annotations

import pytest

from kvloom import ConfigError, Engine, KVSpec

SPEC = KVSpec("m", num_layers=1, num_kv_heads=1, head_size=8, dtype="float32")


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:8000", "localhost", "ftp://host", "http://", "//host", "", "https:///x"]
)
@pytest.mark.parametrize("allow_http", [True, False])
def test_an_endpoint_without_a_scheme_is_refused(endpoint: str, allow_http: bool) -> None:
    tier = {"type": "fsspec", "url": "s3://bucket/kv", "options": {"endpoint": endpoint}, "allow_http": allow_http}
    with pytest.raises(ConfigError) as caught:
        Engine.open({"tiers": [tier]}, SPEC)
    assert caught.value.path.startswith("tiers.0") and "write https://host:port" in str(caught.value)
