"""Helpers for stores that several verbs need, beside `kvloom.inspection`."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvloom import BackendError, ConfigError, KVLoomError, output

if TYPE_CHECKING:
    from kvloom import KVSpec
    from kvloom.inspection import Resolved, Store, TierChoice

T = TypeVar("T")

QUARANTINE = "quarantine/"
"""Prefix of the keys of corrupt blobs that `kvloom scrub` set aside."""
PROBES = "plan/"
"""Prefix of the keys that `kvloom plan` writes to measure, and deletes."""

_LEFT_SECONDS = 3600.0
"""The age from which the blobs of a measurement or a test count as left by a command that was killed."""


def remove_left(store: Store, prefix: str) -> None:
    """Delete what a killed command left below `prefix`. Raises BackendError."""
    ends = time.time() - _LEFT_SECONDS
    old = [entry.key for entry in store.entries(prefix) if 0 < entry.modified < ends]
    if old:
        store.ask(lambda: store.backend.delete_many(old))


def reachable(
    resolved: Resolved, spec: KVSpec | None, stack: ExitStack, *, made: bool = True
) -> tuple[list[Store], dict[str, KVLoomError]]:
    """The stored tiers that can be opened and answer, in order, and by name the errors of the others.

    Raises the first error if no tier answers. made: as `kvloom.inspection.opened` takes it.
    """
    from kvloom.inspection import RECORDS, opened, stored

    found: list[Store] = []
    failed: dict[str, KVLoomError] = {}
    for choice in stored(resolved):
        try:
            store = stack.enter_context(opened(choice, spec, made=made))
            store.ask(lambda backend=store.backend: backend.contains(f"{RECORDS}0.json"))  # type: ignore[misc]
            found.append(store)
        except (BackendError, ConfigError) as error:
            failed[choice.name] = error
    if not found:
        raise next(iter(failed.values()))
    return found, failed


def answers(
    opened: list[Store], failed: dict[str, KVLoomError], ask: Callable[[Store], T]
) -> list[tuple[Store, T]]:  # fmt: skip
    """Each tier's answer. One that gives none is removed from `opened`, and its error is added to `failed`."""
    found = []
    for store in tuple(opened):
        try:
            found.append((store, ask(store)))
        except BackendError as error:
            failed[store.name] = error
            opened.remove(store)
    return found


def say_left_out(failed: Mapping[str, KVLoomError]) -> None:
    for name, error in failed.items():
        output.say(f"kvloom: {name} is left out: {error}", stderr=True)


def said(error: BaseException) -> str:
    """An error in a few words."""
    return f"{type(error).__name__}: {error}"


@contextmanager
def for_a_try(choice: TierChoice) -> Iterator[TierChoice]:
    """The tier; where its directory is not there yet, one like it in a directory beside that is gone afterwards."""
    from kvloom import inspection

    assert choice.backend is not None
    place = getattr(choice.backend.config, "path", None)
    named = isinstance(place, Path) or (isinstance(place, str) and os.sep in place)
    path = Path(str(place)).expanduser() if named else Path()
    scratch = inspection.in_time(choice, lambda: _beside(path)) if named else None
    if place is None or scratch is None:
        yield choice
        return
    try:
        config = choice.backend.config.model_copy(update={"path": type(place)(os.path.join(scratch, path.name))})
        yield replace(choice, backend=replace(choice.backend, config=config))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _beside(path: Path) -> str | None:
    """A new directory in the nearest parent of `path` that is there; None if `path` is there, or none can be made."""
    if os.path.lexists(path):  # also a link that leads nowhere: the engine makes nothing beside it
        return None
    there = next(parent for parent in path.parents if os.path.lexists(parent))
    try:
        return tempfile.mkdtemp(dir=there, prefix=".kvloom-try-")
    except OSError:  # opening the tier fails too, and says why
        return None
