"""RadixTokenDatabase: learns from stored sequences, and cuts where they branch."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator

from kvloom import BackendError, ByteSize, KVSpec, Segment, TokenDatabase, int32_tokens, select
from kvloom import Config as BaseConfig
from kvloom_tokens_radix.cutting import Rules
from kvloom_tokens_radix.journal import Journal
from kvloom_tokens_radix.naming import DOMAIN, named
from kvloom_tokens_radix.tree import Tree

if TYPE_CHECKING:
    import torch

_everybody: weakref.WeakSet[RadixTokenDatabase] = weakref.WeakSet()


class RadixTokenDatabase(TokenDatabase):
    """Segments end where chunks do, where known sequences branch and where sequences end.

    A forked child begins anew, as another process would.
    """

    type: ClassVar[str] = "radix"

    class Config(BaseConfig):
        """The settings of `tokens: {type: radix}`."""

        min_tokens: int = Field(16, ge=1)
        """No segment is shorter."""
        align_tokens: int = Field(1, ge=1)
        """Segments end at multiples of this many tokens: the engine's block size, where KV is moved in blocks."""
        memory: ByteSize = Field(ByteSize(64 << 20), ge=64 << 10)
        """Maximum memory for known sequences: about 4 bytes for each token. The least recently used are forgotten."""
        path: Path | None = None
        """The directory of the journal; made if missing, `~` is the home directory. None: a restart forgets."""

        @field_validator("path", mode="before")
        @classmethod
        def _names_a_directory(cls, value: Any) -> Any:
            if isinstance(value, str) and not value.strip():  # as a Path, that is the working directory
                raise ValueError("empty; name a directory")
            return value

    def __init__(self, config: Config, spec: KVSpec | None = None) -> None:
        super().__init__(config, spec)
        self._settings = config
        self._directory = None if config.path is None else _made(config.path)
        self._closed = False
        self._begin()
        _everybody.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], tuple[Tree, Journal | None]] = {}

    def segments(self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str = "") -> list[Segment]:
        data = int32_tokens(tokens).tobytes()
        if not isinstance(salt, str):
            raise TypeError(f"salt: expected a str, got {type(salt).__name__}")
        with self._lock:
            tree, _ = self._tree()
            ends = tree.cut(salt, data)
        whole = named(data, ends, fingerprint=self.fingerprint, salt=salt)
        return whole[select(whole, mask, tokens.numel()) :]

    def learn(self, tokens: torch.Tensor, *, salt: str = "") -> None:
        data = int32_tokens(tokens).tobytes()
        with self._lock:
            tree, journal = self._tree()
            changes = tree.learn(salt, data)
            if journal is not None and changes:
                journal.add(changes)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            known, self._known = self._known, {}
        for _, journal in known.values():
            if journal is not None:
                journal.close()

    def _tree(self) -> tuple[Tree, Journal | None]:
        """The tree of this fingerprint. Its journal is read when it is first needed.

        Raises BackendError once this is closed: a call that is late would take a journal again, and keep it.
        """
        if self._closed:
            raise BackendError("the token database is closed")
        about = (self.fingerprint, self.chunk_tokens)
        if about not in self._known:
            settings = self._settings
            tree = Tree(Rules(self.chunk_tokens, settings.min_tokens, settings.align_tokens), settings.memory)
            journal = None
            if self._directory is not None:
                text = "\0".join((DOMAIN, *map(str, (*about, settings.min_tokens, settings.align_tokens))))
                name = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
                journal = Journal(self._directory, name, self._lock)
                tree = journal.load(tree)
            self._known[about] = tree, journal
        return self._known[about]


def _made(path: Path) -> Path:
    try:
        root = Path(os.path.abspath(path.expanduser()))
    except RuntimeError as error:
        raise ValueError(f"path: unknown home directory: {path}; name a directory") from error
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"path: cannot make {root}: {error.strerror or error}; name a directory") from error
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"path: cannot write to {root}; name a directory that this user may write to")
    return root


def _after_fork_in_child() -> None:
    for database in tuple(_everybody):
        database._begin()


os.register_at_fork(after_in_child=_after_fork_in_child)
