"""Options take no logins, whatever they are called."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kvloom_backend_fsspec.backend import FsspecBackend


@pytest.mark.parametrize(
    "options",
    [
        {"endpoint": "http://u:hunter2@127.0.0.1:1"},
        {"endpoint": "https://hunter2@host/path"},
        {"client_kwargs": {"endpoint_url": "http://u:hunter2@host"}},
        {"proxies": ["http://u:hunter2@proxy:3128"]},
        {"endpoint": "http://127.0.0.1:1/?x=hunter2"},
    ],
)
def test_an_option_with_a_login_in_its_url_is_refused_and_not_repeated(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        FsspecBackend.Config(url="s3://bucket/kv", options=options, allow_http=True)
    (details,) = caught.value.errors()
    assert "hunter2" not in details["msg"] and "standard places" in details["msg"]


@pytest.mark.parametrize("endpoint", ["https://host:9000/a@b", "https://host"])
def test_other_urls_pass(endpoint: str) -> None:
    FsspecBackend.Config(url="s3://bucket/kv", options={"endpoint": endpoint})
