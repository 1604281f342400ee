"""The connector to check, and how the engine is to be started with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloom import ConfigError

_KERNEL = 32
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
    """Seconds from an answer until what it stored has to be found."""
    seconds: float = 60.0
    """Deadline of each answer of the engine."""
    label: str = ""
    """Its name in reports, if that is not the connector's."""
    is_tier: bool = False
    """It is behind host memory, which is filled when it is asked, and emptied where the engine's own cache is."""

    @classmethod
    def named(cls, connector: str, **more: Any) -> Subject:
        """The subject of `MODULE:CLASS`, or of a name that the engine knows. Raises ConfigError."""
        module, name = place(connector, "--connector", "vLLM")
        if "block" in more:
            more.setdefault("chunk", more["block"])
        subject = cls(name, module, **more)
        if subject.block < 1 or subject.block % _KERNEL:
            text = f"expected a multiple of {_KERNEL} tokens, as vLLM's kernels for processors take them"
            raise ConfigError("--block", f"{text}, not {subject.block}")
        if subject.chunk < 1 or subject.chunk % subject.block:
            text = f"expected a multiple of the block's {subject.block} tokens, not {subject.chunk}"
            raise ConfigError("--chunk", text)
        if "settle" in more and not 0 <= subject.settle <= subject.patience:
            text = f"expected 0 to {subject.patience:g} seconds, a quarter of --seconds, not {subject.settle:g}"
            raise ConfigError("--settle", text)
        return subject

    @classmethod
    def of_spec(cls, spec: str, *, extra: dict[str, Any], **more: Any) -> Subject:
        """The subject of vLLM's OffloadingConnector with the spec `MODULE:CLASS`. Raises ConfigError."""
        module, name = place(spec, "--offloading-spec")
        whole = {"spec_name": name, "spec_module_path": module, **extra}
        return cls.named("OffloadingConnector", extra=whole, label=spec, **more)

    @classmethod
    def of_tier(cls, tier: str, *, extra: dict[str, Any], **more: Any) -> Subject:
        """The subject of a secondary tier of vLLM's offloading, `MODULE:CLASS` or vLLM's name. Raises ConfigError."""
        module, name = place(tier, "--secondary-tier", "vLLM")
        told = {"type": name, **({"module_path": module} if module else {}), **extra}
        settings = {
            "spec_name": "HostTieringSpec", "spec_module_path": "kvloom_testkit.engines.vllm.tiering",
            "cpu_bytes_to_use": 64 << 20, "secondary_tiers": [told],
        }  # fmt: skip
        if "chunk" in more:
            settings["block_size"] = more["chunk"]
        return cls.named("OffloadingConnector", extra=settings, label=tier, is_tier=True, **more)

    @property
    def patience(self) -> float:
        """Seconds after which what holds blocks or requests is taken to hold them for ever."""
        return self.seconds / 4

    @property
    def has_store(self) -> bool:
        """Return whether its settings name the kit's directory."""
        return replaced(self.extra, "") != self.extra

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a report names."""
        return {"extra": self.extra, "block": self.block, "chunk": self.chunk, "settle": self.settle}

    def transfer(self, store: Path, policy: str) -> dict[str, Any]:
        """The arguments of KVTransferConfig."""
        return {
            "kv_connector": self.cls, "kv_connector_module_path": self.module, "kv_role": "kv_both",
            "kv_load_failure_policy": policy, "kv_connector_extra_config": replaced(self.extra, str(store)),
        }  # fmt: skip

    def __str__(self) -> str:
        return self.label or (f"{self.module}:{self.cls}" if self.module else self.cls)


def place(text: str, option: str, engine: str = "") -> tuple[str | None, str]:
    """The module and the class of `MODULE:CLASS`, or no module and a name that the engine knows. Raises ConfigError."""
    module, colon, name = text.rpartition(":")
    valid = name.isidentifier() and (not colon or all(part.isidentifier() for part in module.split(".")))
    if not valid or not (colon or engine):
        known = f", or a name that {engine} knows" if engine else ""
        raise ConfigError(option, f"expected MODULE:CLASS{known}, not {text!r}")
    return module or None, name


def replaced(value: Any, text: str) -> Any:
    """A setting with a text for `{tmp}`, at any depth."""
    if isinstance(value, str):
        return value.replace(TMP, text)
    if isinstance(value, dict):
        return {name: replaced(one, text) for name, one in value.items()}
    if isinstance(value, list):
        return [replaced(one, text) for one in value]
    return value
