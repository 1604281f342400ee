"""Deleting many objects by one request, which is lost where the server has just closed an idle connection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvloom import BackendError
from kvloom_backend_fsspec.config import Config
from kvloom_backend_fsspec.stores.obstore_store import ObstoreStore


@pytest.mark.parametrize(("losses", "requests"), [(0, 1), (1, 2), (5, 2)])
def test_a_request_that_is_lost_is_made_once_more(tmp_path: Path, losses: int, requests: int) -> None:
    store = ObstoreStore(Config(url=f"file://{tmp_path}"))
    made: list[Sequence[str]] = []

    def delete(client: Any, names: Sequence[str]) -> None:
        made.append(names)
        if len(made) <= losses:
            raise store._errors.GenericError("Error performing POST ... - HTTP error: error sending request")

    store._native = SimpleNamespace(delete=delete)
    if losses < 2:
        store.delete(["a", "b"])
    else:
        with pytest.raises(BackendError, match="error sending request"):
            store.delete(["a", "b"])
    assert made == [["a", "b"]] * requests
