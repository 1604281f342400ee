"""The connector to check, and how the engine is to be started with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloom import ConfigError

TMP = "{tmp}"
"""In a setting: a directory that the kit makes, and damages."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A connector of vLLM, installed or on the path."""

    cls: str
    module: str | None
    """None for the connectors that the engine knows by name."""
    extra: dict[str, Any] = field(default_factory=dict)
    """`kv_connector_extra_config`; `{tmp}` in a text is a directory of each store's own."""
    block: int = 32
    """Tokens of a block of the engine."""
    chunk: int = 32
    """Tokens of the smallest piece that the connector stores; a multiple of the block."""
    tolerance: float = 1e-3
    """Largest difference of two logprobs that count as equal; more for a connector that stores KV with loss."""
    settle: float = 0.3
    """Seconds that the connector may take to store in the background."""
    seconds: float = 60.0
    """Deadline of each answer of the engine."""

    @classmethod
    def named(cls, connector: str, **more: Any) -> Subject:
        """The subject of `MODULE:CLASS`, or of a name that the engine knows. Raises ConfigError."""
        module, name = _place(connector)
        if not name:
            raise ConfigError("--connector", f"expected MODULE:CLASS, or a name that vLLM knows, not {connector!r}")
        if "block" in more:
            more.setdefault("chunk", more["block"])
        subject = cls(name, module or None, **more)
        if subject.block < 1 or subject.chunk < 1 or subject.chunk % subject.block:
            text = f"expected a multiple of the block's {subject.block} tokens, not {subject.chunk}"
            raise ConfigError("--chunk", text)
        return subject

    @classmethod
    def of_spec(cls, spec: str, *, extra: dict[str, Any], **more: Any) -> Subject:
        """The subject of vLLM's OffloadingConnector with the spec `MODULE:CLASS`. Raises ConfigError."""
        module, name = _place(spec)
        if not (module and name):
            raise ConfigError("--offloading-spec", f"expected MODULE:CLASS, not {spec!r}")
        whole = {"spec_name": name, "spec_module_path": module, **extra}
        return cls.named("OffloadingConnector", extra=whole, **more)

    @property
    def has_store(self) -> bool:
        """Return whether its settings name the kit's directory."""
        return _replaced(self.extra, "") != self.extra

    def transfer(self, store: Path, policy: str) -> dict[str, Any]:
        """The arguments of KVTransferConfig."""
        return {
            "kv_connector": self.cls, "kv_connector_module_path": self.module, "kv_role": "kv_both",
            "kv_load_failure_policy": policy, "kv_connector_extra_config": _replaced(self.extra, str(store)),
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.module}:{self.cls}" if self.module else self.cls


def _place(text: str) -> tuple[str, str]:
    """The module and the class of `MODULE:CLASS`; no module if none is named, no class if it is neither."""
    module, colon, name = text.rpartition(":")
    valid = name.isidentifier() and (not colon or all(part.isidentifier() for part in module.split(".")))
    return (module, name) if valid else ("", "")


def _replaced(value: Any, text: str) -> Any:
    if isinstance(value, str):
        return value.replace(TMP, text)
    if isinstance(value, dict):
        return {name: _replaced(one, text) for name, one in value.items()}
    if isinstance(value, list):
        return [_replaced(one, text) for one in value]
    return value
