"""Maps keys to names of objects and back: the only module that knows the names.

The blob of `a/b/name` is the object `<prefix>/a/b/name=kv`. `=` occurs in no key: where a store has directories, a key
that is also the beginning of another one is never a file where a directory is needed. Names that begin with `=` are the
backend's own.
"""

from __future__ import annotations

import re
import uuid

_PART = r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._-]+"
_KEY = re.compile(rf"(?:{_PART}/)*{_PART}")
_MAX_KEY_CHARS = 200
_BLOB = "=kv"

_DRAFTS = "=tmp"
_UNFINISHED = re.compile(r"=(?:tmp|probe)[/-](?:[0-9a-f]{32}/)?[0-9a-f]{32}")
_STAGED = re.compile(rf"{_BLOB}#[0-9]+")
"""Behind a key: where obstore writes to, of a local directory, before it renames."""

HOLDS = "=hold"
"""The directory of rights."""


class Names:
    """Maps keys to objects under `prefix`, which is empty or ends in no slash."""

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}/" if prefix else ""
        self._drafts = _DRAFTS

    def blob(self, key: str) -> str:
        """The object of `key`. Raises ValueError if it is not a key: such a name could lie outside the prefix."""
        if len(key) > _MAX_KEY_CHARS or _KEY.fullmatch(key) is None:
            raise ValueError(f"not a key: {key!r}; expected parts of [A-Za-z0-9._-] joined by '/'")
        return f"{self._prefix}{key}{_BLOB}"

    def directory(self, prefix: str) -> str:
        """The directory to list for the keys that start with `prefix`."""
        return (self._prefix + prefix.rpartition("/")[0]).rstrip("/")

    def key(self, name: str) -> str | None:
        """The key of an object, or None if it is not a blob."""
        key = name[len(self._prefix) : -len(_BLOB)]
        ours = name.startswith(self._prefix) and name.endswith(_BLOB)
        return key if ours and len(key) <= _MAX_KEY_CHARS and _KEY.fullmatch(key) else None

    def may_hold(self, place: str) -> bool:
        """Return whether a directory of that name, or the object, may belong to a blob."""
        inside = place.removeprefix(self._prefix).removesuffix(_BLOB)
        return place.startswith(self._prefix) and len(inside) <= _MAX_KEY_CHARS and _KEY.fullmatch(inside) is not None

    def is_worth_a_look(self, directory: str) -> bool:
        """Return whether blobs or drafts may lie in a directory of that name."""
        return self.may_hold(directory) or directory.startswith(self._prefix + _DRAFTS)

    def is_unfinished(self, name: str) -> bool:
        """Return whether an object was left behind by a put that was interrupted."""
        if not name.startswith(self._prefix):
            return False
        inside = name[len(self._prefix) :]
        key, staged, _ = inside.rpartition(_BLOB)
        return bool(
            _UNFINISHED.fullmatch(inside)
            or (staged and _STAGED.fullmatch(inside, len(key)) and len(key) <= _MAX_KEY_CHARS and _KEY.fullmatch(key))
        )

    def right(self, name: str) -> str:
        """The directory of a right."""
        return f"{self._prefix}{HOLDS}/{name}"

    def draft(self) -> str:
        """A new name for an unpublished draft."""
        return f"{self._prefix}{self._drafts}/{uuid.uuid4().hex}"

    def draft_elsewhere(self) -> None:
        """Use another directory for drafts from now on, because something else is in its place."""
        self._drafts = f"{_DRAFTS}-{uuid.uuid4().hex}"

    def probe(self) -> str:
        """A new name to try the store with; in no directory of its own, where something else could lie."""
        return f"{self._prefix}=probe-{uuid.uuid4().hex}"
