"""What is longer than its reader takes is refused before a client reads it into memory."""

from __future__ import annotations

import uuid

import pytest

from kvloom import CorruptBlobError, get_at_most
from kvloom_backend_fsspec.backend import FsspecBackend


def test_fsspec_asks_how_long_a_file_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FsspecBackend(FsspecBackend.Config(url=f"memory://{uuid.uuid4().hex}"))
    backend.put("key", [b"x" * 11])
    assert get_at_most(backend, "key", 11) == b"x" * 11 and get_at_most(backend, "other", 11) is None
    monkeypatch.setattr(type(backend._store()._fs), "cat_file", None)
    with pytest.raises(CorruptBlobError, match="11 bytes where at most 10"):
        get_at_most(backend, "key", 10)
