"""Storages of HiCache in processes of their own: the tools of their requirements. Importable without SGLang."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloom_testkit.engines.base import BaseBench
from kvloom_testkit.engines.process import Engine, EngineError, Host
from kvloom_testkit.engines.subject import place, replaced

HOST = "kvloom_testkit.engines.sglang.host"
_USUAL: dict[str, Any] = {
    "layout": "page_first", "dtype": "bfloat16", "page_size": 4, "model": "a/model", "ranks": [0, 1], "latents": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage that SGLang can load by `--hicache-storage-backend`."""

    cls: str
    module: str | None
    """None for those that SGLang knows by name, such as `file`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """`extra_config`; `{tmp}` in a text is a directory of each store's own."""
    seconds: float = 60.0
    """Deadline of each call."""

    @classmethod
    def named(cls, storage: str, **more: Any) -> Storage:
        """The subject of `MODULE:CLASS`, or of a name that SGLang knows. Raises ConfigError."""
        module, name = place(storage, "--storage", "SGLang")
        return cls(name, module, **more)

    @property
    def has_store(self) -> bool:
        """Return whether its files are in the kit's directory."""
        return replaced(self.extra, "") != self.extra or self.cls == "file"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a report names."""
        return {"extra": self.extra}

    def __str__(self) -> str:
        return f"{self.module}:{self.cls}" if self.module else self.cls


class StorageBench(BaseBench):
    """Opens one storage after another, or several at once."""

    def __init__(self, subject: Storage, *, short: bool = False, host: Host | None = None) -> None:
        super().__init__(HOST, {"OMP_NUM_THREADS": "1"}, seconds=subject.seconds, short=short, host=host)
        self.subject = subject
        self._open: list[Engine] = []

    def open(self, store: str = "main", *, fresh: bool = False, **settings: Any) -> Engine:
        """A process with the storage; others go on. fresh: of a new interpreter. Raises EngineError."""
        folder = self.store(store)
        folder.mkdir(exist_ok=True)
        engine = self.fork(fresh)
        self._open.append(engine)
        about = self.subject
        engine.start(
            name=about.cls, module=about.module, extra=replaced(about.extra, str(folder)), folder=str(folder),
            **{**_USUAL, **settings},
        )  # fmt: skip
        return engine

    def end_session(self) -> None:
        """Close every storage, or kill its process."""
        ending, self._open = self._open, []
        for engine in ending:
            try:
                engine.close()
            except EngineError:
                engine.kill()

    def files(self, store: str) -> list[Path]:
        """The files of a store."""
        return [path for path in self.store(store).rglob("*") if path.is_file()]
