"""Messages between the demo's command and its two processes, and the settings they share."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvloom import replace_file, text_of

SIZES = {"small": 60_000_000, "medium": 150_000_000}
_MOST_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Job:
    """One run of the demo."""

    model: str
    """A path or a hub name; empty for random weights."""
    parameters: int
    """Number of parameters of the model with random weights; 0 for a named model."""
    document: str
    """Path of the text."""
    tokens: int
    """Maximum number of tokens of the document."""
    question: str
    """The text appended to the document."""
    config: str
    """Path of the engine's configuration."""
    codec: str = ""
    """The serializer of its disk tier, if it is not the default: KV may then be rounded."""

    def save(self, path: Path) -> None:
        replace_file(path, json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Job:
        """Raises OSError, ValueError, RecursionError or TypeError if it is none."""
        return cls(**json.loads(text_of(path, _MOST_BYTES)))


def parameters(size: str) -> int:
    """`small`, `medium`, `150M`, `1.1B` or a plain number. ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([MB]?)", size, re.IGNORECASE)
    count = SIZES.get(size) or (match and int(float(match[1]) * {"": 1, "M": 10**6, "B": 10**9}[match[2].upper()]))
    if not count or count < 10**6:
        raise ValueError(f"{size!r} is not small, medium, or a number of parameters such as 150M")
    return count


def llama_shape(count: int) -> dict[str, Any]:
    """The shape of a Llama of about `count` parameters: 12 hidden² in each layer, grouped-query attention."""
    layers = 8 if count < 10**8 else 12 if count < 6 * 10**8 else 24
    hidden = max(64, round((count / (12 * layers)) ** 0.5 / 64) * 64)
    heads = hidden // 64
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": next(kv for kv in range(max(1, heads // 4), 0, -1) if heads % kv == 0),
        "intermediate_size": round(hidden * 3 / 64) * 64,
    }
