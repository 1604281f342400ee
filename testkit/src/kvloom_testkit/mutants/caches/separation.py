"""Faults in what must not meet, where the store fails, and in what is left behind."""

from __future__ import annotations

import contextlib
import hashlib
import io
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import DynamicCache

from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.transformers import CHUNK, DirectoryCache

Part = list[tuple[torch.Tensor, torch.Tensor]]


class OneDraftForAll(Mutant, DirectoryCache):
    """Files are drafted under one name, which every process uses."""

    breaks = "G11"

    def write(self, key: str, part: Part) -> None:
        buffer = io.BytesIO()
        torch.save(part, buffer)
        draft = self.folder / "draft"
        draft.write_bytes(hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())
        draft.replace(self.path(key))


class OneDraftForEachChunk(Mutant, DirectoryCache):
    """The draft of a chunk has one name, which every process uses that writes the same chunk."""

    breaks = "G11"

    def draft(self, key: str) -> Path:
        return self.folder / f"{key}.draft"


class WritesInPlace(Mutant, DirectoryCache):
    """A file is there before its bytes are, and an empty one is taken for zeros."""

    breaks = "G11"

    def write(self, key: str, part: Part) -> None:
        buffer = io.BytesIO()
        torch.save(part, buffer)
        self.put(key, buffer.getvalue())

    def put(self, key: str, data: bytes) -> None:
        self.path(key).write_bytes(data)

    def data(self, key: str) -> bytes | None:
        return self.path(key).read_bytes()

    def read(self, key: str) -> Part | None:
        if self.data(key):
            return super().read(key)
        config = self.model.config
        shape = 1, config.num_key_value_heads, CHUNK, config.head_dim
        return [(torch.zeros(shape), torch.zeros(shape))] * config.num_hidden_layers


class TrustsDraftsOfOthers(WritesInPlace):
    """A chunk's draft has one name for all processes, and that another was first is no error."""

    breaks = "G11"

    def put(self, key: str, data: bytes) -> None:
        draft = self.folder / f"{key}.draft"
        draft.write_bytes(data)
        with contextlib.suppress(FileNotFoundError):
            draft.replace(self.path(key))


class KeysWithoutWeights(Mutant, DirectoryCache):
    """One directory for all models of a shape."""

    breaks = "G12"

    def weights(self) -> list[torch.Tensor]:
        return []


class KeysWithoutType(Mutant, DirectoryCache):
    """One directory for all types of a model, whose KV is converted."""

    breaks = "G13"

    def fingerprint(self) -> str:
        return "all"

    def read(self, key: str) -> Part | None:
        part = super().read(key)
        return part and [(keys.to(self.model.dtype), values.to(self.model.dtype)) for keys, values in part]


class HasNoChecksum(Mutant, DirectoryCache):
    """Takes the content of a file for what was written."""

    breaks = "G14"

    def data(self, key: str) -> bytes | None:
        return self.path(key).read_bytes()[32:] if self.has(key) else None


class RaisesAtLosses(Mutant, DirectoryCache):
    """What is known to be there is read, and an exception if it is not."""

    breaks = "G15"
    known: ClassVar[set[str]] = set()

    def has(self, key: str) -> bool:
        if super().has(key):
            self.known.add(key)
        return key in self.known

    def data(self, key: str) -> bytes | None:
        return super().data(key) if self.path(key).stat().st_size else None


class TakesEveryLayer(Mutant, DirectoryCache):
    """Layers that keep less than all of K and V are taken for such that keep all."""

    breaks = "G16"

    def __init__(self, model: Any, path: str) -> None:
        self.model = model
        self.folder = Path(path) / self.fingerprint()
        self.folder.mkdir(parents=True, exist_ok=True)


class TakesLayersWithStates(TakesEveryLayer):
    """Layers with states are left as they are, and the others loaded."""

    breaks = "G17"

    def part(self, cache: DynamicCache, row: int, chunk: int) -> Part:
        span, empty = slice(chunk * 32, (chunk + 1) * 32), torch.zeros(1, 1, 32, 1)
        layers = [layer if hasattr(layer, "keys") else None for layer in cache.layers]
        return [
            (empty, empty) if one is None else (one.keys[row : row + 1, :, span], one.values[row : row + 1, :, span])
            for one in layers
        ]

    def append(self, cache: DynamicCache, parts: list[Part]) -> None:
        for layer, (keys, values) in enumerate(parts[0]):
            if keys.shape[-1] > 1:
                cache.update(keys, values, layer)


class OneShapeForBoth(Mutant, DirectoryCache):
    """K is stored in the shape of V."""

    breaks = "G18"

    def part(self, cache: DynamicCache, row: int, chunk: int) -> Part:
        part = super().part(cache, row, chunk)
        return [(keys * (keys.shape == values.shape), values) for keys, values in part]


class LeavesFilesOpen(Mutant, DirectoryCache):
    """A file is opened for each call."""

    breaks = "G19"
    open: ClassVar[list[Any]] = []

    def check(self, mask: torch.Tensor, options: dict[str, Any]) -> None:
        super().check(mask, options)
        self.open.append(open("/dev/null"))  # noqa: SIM115


class LeavesAHook(Mutant, DirectoryCache):
    """A hook stays with the model."""

    breaks = "G20"

    def __enter__(self) -> DirectoryCache:
        self.model.model.layers[0].register_forward_hook(lambda *args: None)
        return self
