"""KV buffers over a dictionary that can create, and what tests put into them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import kvloom
from kvloom import Buffers
from kvloom.builtin.dict_backend import DictBackend
from kvloom_connector_vllm.buffers import KVLookupBuffer, KVStoreBuffer
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend

NOTHING = [None] * 5
MIB = 2**20


class CreatingDict(DictBackend):
    """A dictionary that can create; what its verbs do can be replaced."""

    type = "creating_dict"

    def create(self, key: str, blob: Buffers) -> bool:
        mine = kvloom.join(blob)
        return self._blobs.setdefault(key, mine) is mine


def directory(path: Path) -> CompleteDirectoryBackend:
    return CompleteDirectoryBackend(CompleteDirectoryBackend.Config(path=path))


def lookup(backend: Any = None, **settings: Any) -> KVLookupBuffer:
    return KVLookupBuffer(backend or CreatingDict(kvloom.Config()), **{"capacity": MIB, "timeout": 0.0, **settings})


def store(backend: Any = None, **settings: Any) -> KVStoreBuffer:
    return KVStoreBuffer(backend or CreatingDict(kvloom.Config()), **{"capacity": MIB, "timeout": 0.0, **settings})


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens)


def put_in(buffer: KVLookupBuffer, tokens: Sequence[int], roi: Sequence[int] | None = None, mark: float = 0) -> None:
    mask = torch.ones(len(tokens), dtype=torch.bool) if roi is None else torch.tensor(roi, dtype=torch.bool)
    buffer.insert(ids(*tokens), mask, torch.full((2, 3), mark), torch.full((3,), -mark), torch.full((1, 4), mark))


def mark(taken: list[torch.Tensor | None]) -> float | None:
    return None if taken[2] is None else float(taken[2].flatten()[0])
