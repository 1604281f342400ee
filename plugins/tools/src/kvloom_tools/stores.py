"""Helpers for stores that several verbs need, beside `kvloom.inspection`."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvloom import BackendError, ConfigError, KVLoomError, output

if TYPE_CHECKING:
    from kvloom import KVSpec
    from kvloom.inspection import Resolved, Store, TierChoice

T = TypeVar("T")

_PAUSES = (0.01, 0.1, 0.5, 1.0, 0.0)
"""Seconds between attempts to remove a directory."""

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
    made: list[str] = []
    try:
        if named:
            inspection.in_time(choice, lambda: _make_beside(path, made))
        if place is None or not made:
            yield choice
            return
        config = choice.backend.config.model_copy(update={"path": type(place)(os.path.join(made[0], path.name))})
        yield replace(choice, backend=replace(choice.backend, config=config))
    finally:
        with suppress(BackendError):  # of a file system that hangs
            if made:
                inspection.in_time(choice, lambda: _remove(made[0]))


def _make_beside(path: Path, made: list[str]) -> None:
    """Make a directory in the nearest parent of `path` that is there, unless `path` is there, and append it to `made`.

    It is appended first: who waits may be interrupted in between, and removes it.
    """
    if os.path.lexists(path):  # also a link that leads nowhere: the engine makes nothing beside it
        return
    there = next(parent for parent in path.parents if os.path.lexists(parent))
    scratch = os.path.join(there, f".kvloom-try-{secrets.token_hex(8)}")
    made.append(scratch)
    try:
        os.mkdir(scratch, 0o700)
    except OSError:  # opening the tier fails too, and says why
        made.remove(scratch)


def _remove(scratch: str) -> None:
    """Remove a directory to which a call that was given up, as by Ctrl-C, may still write."""
    for pause in _PAUSES:
        shutil.rmtree(scratch, ignore_errors=True)
        if not os.path.lexists(scratch):
            return
        time.sleep(pause)
