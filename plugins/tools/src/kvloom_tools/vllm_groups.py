"""The groups of KV cache that vLLM divides a model's layers into, asked of vLLM itself, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloom import ConfigError, output
from kvloom_tools.model import spec_from

if TYPE_CHECKING:
    from kvloom.inspection import Resolved
    from kvloom_tools.measure import Sample

_MODULE = "kvloom_connector_vllm.adapter.footprint"
_NEEDED = (("vllm", "vllm"), ("kvloom_connector_vllm", "kvloom-connector-vllm"))
"""Packages, and their distributions."""
_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Group:
    """One group; the fields are those that `kvloom_connector_vllm.adapter.footprint` writes."""

    kind: str
    state: bool
    layers: int
    parts: int
    """Number of blobs of a chunk."""
    block_tokens: int
    chunk_tokens: int
    page_bytes: int
    """Of one block in one layer, of all parts."""
    spec: dict[str, Any]
    geometry: dict[str, Any]

    @property
    def bytes_per_token(self) -> int:
        return self.page_bytes * self.layers // self.block_tokens

    def sample(self, resolved: Resolved) -> Sample:
        """A chunk of one part."""
        from kvloom_tools.measure import Sample

        choice, spec = resolved.connector, spec_from(self.spec)
        if not choice.type.startswith("vllm"):
            raise ConfigError("connector", f"{choice.type!r} does not read vLLM's memory; write vllm")
        settings = type(choice.config).model_validate({**choice.config.model_dump(), "geometry": self.geometry})
        connector = choice.cls(settings, spec)
        return Sample(tuple(connector.shape(self.chunk_tokens)), spec, connector.format, self.chunk_tokens)

    def as_json(self) -> dict[str, Any]:
        names = ("kind", "layers", "parts", "block_tokens", "chunk_tokens", "bytes_per_token")
        return {name: getattr(self, name) for name in names}


def groups_of(model: str, file: Path, dtype: str | None) -> list[Group]:
    """The groups of a model under a configuration. ConfigError if vLLM is not there, or it does not take the model."""
    for package, remedy in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ConfigError("--vllm", f"{remedy} is not installed here; pip install it, or give --spec instead")
    with tempfile.TemporaryDirectory() as folder, output.progress(f"asking vLLM about {model}"):
        out = Path(folder) / "groups.json"
        command = [sys.executable, "-m", _MODULE, model, str(file), str(out), *filter(None, [dtype])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise ConfigError("--vllm", f"no answer within {_SECONDS:.0f} s") from None
        if not out.exists():
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise ConfigError("--vllm", f"vLLM ended without an answer: {last}")
        said = json.loads(out.read_text())
    if "error" in said:
        raise ConfigError("--vllm", said["error"])
    return [Group(**row) for row in said["groups"]]


def largest_of(groups: Sequence[Group]) -> Group:
    """The group with the largest chunks, of those that are not states if there are any."""
    return max(groups, key=lambda group: (not group.state, group.bytes_per_token * group.chunk_tokens))


def share_of(groups: Sequence[Group]) -> float:
    """The part that one blob of the largest group has of all bytes that are stored of its tokens; 1 of no groups."""
    if not groups:
        return 1.0
    largest = largest_of(groups)
    return largest.bytes_per_token / largest.parts / sum(group.bytes_per_token for group in groups)
