"""A cache of transformers' `generate` that keeps chunks of prompts in a directory, by the shortest way that is right.

It imports nothing of kvloom. What it does not serve it refuses: padding, beams, and layers that keep less than all of K
and V.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

CHUNK = 32
_DIGEST_BYTES = 32


class DirectoryCache:
    """A context manager whose `generate` starts from stored KV. path: the directory."""

    def __init__(self, model: Any, path: str) -> None:
        self.model = model
        if any(type(layer) is not DynamicLayer for layer in self.new_cache().layers):
            raise ValueError("only layers that keep all of K and V are served")
        self.folder = Path(path) / self.fingerprint()
        self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> DirectoryCache:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def new_cache(self) -> DynamicCache:
        """An empty cache of the model's."""
        return DynamicCache(config=self.model.config)

    def fingerprint(self) -> str:
        """A name for all that decides which KV a prompt has, apart from its tokens."""
        digest = hashlib.sha256(repr((self.model.config.to_json_string(), self.kind())).encode())
        for tensor in self.weights():
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def kind(self) -> str:
        """The type of the model."""
        return str(self.model.dtype)

    def weights(self) -> list[torch.Tensor]:
        """The model's weights."""
        return list(self.model.state_dict().values())

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> Any:
        """`model.generate`; ValueError for what is not served."""
        self.check(attention_mask, options)
        rows = [self.keys(row.tolist()) for row in input_ids]
        cache, count = self.new_cache(), self.found(rows, input_ids.shape[1])
        for chunk in range(count):
            parts = [self.read(keys[chunk]) for keys in rows]
            if any(part is None for part in parts):
                break
            self.append(cache, [part for part in parts if part is not None])
        self.crop(cache, input_ids.shape[1])
        output = self.model.generate(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, **options
        )
        for row, keys in enumerate(rows):
            for chunk, key in enumerate(keys):
                if not self.has(key):
                    self.write(key, self.part(cache, row, chunk))
        return output

    def check(self, mask: torch.Tensor, options: dict[str, Any]) -> None:
        """Raise ValueError for a call that is not served."""
        if not bool(mask.all()):
            raise ValueError("padding is not served")
        if options.get("num_beams", 1) != 1 or options.get("num_return_sequences", 1) != 1:
            raise ValueError("beams and several answers are not served")

    def keys(self, prompt: list[int]) -> list[str]:
        """The key of each whole chunk, which covers all tokens before its end."""
        found, digest = [], b""
        for end in range(CHUNK, len(prompt) + 1, CHUNK):
            digest = hashlib.sha256(digest + repr(prompt[end - CHUNK : end]).encode()).digest()
            found.append(digest.hex())
        return found

    def found(self, rows: list[list[str]], length: int) -> int:
        """The number of leading chunks that all rows have."""
        counts = [next((at for at, key in enumerate(keys) if not self.has(key)), len(keys)) for keys in rows]
        return min(counts)

    def has(self, key: str) -> bool:
        """Return whether a chunk is stored."""
        return self.path(key).exists()

    def path(self, key: str) -> Path:
        """The file of a chunk."""
        return self.folder / key

    def append(self, cache: DynamicCache, parts: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> None:
        """Append a chunk to all layers. parts: of each row, K and V of each layer."""
        for layer, pairs in enumerate(zip(*parts, strict=True)):
            keys, values = (torch.cat(one) for one in zip(*pairs, strict=True))
            cache.update(keys, values, layer)

    def crop(self, cache: DynamicCache, length: int) -> None:
        """Leave the last token of the prompt to be computed."""
        if cache.get_seq_length() >= length:
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, : length - 1], layer.values[:, :, : length - 1]

    def part(self, cache: DynamicCache, row: int, chunk: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of a chunk, of each layer."""
        span = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        return [
            (layer.keys[row : row + 1, :, span].clone(), layer.values[row : row + 1, :, span].clone())
            for layer in cache.layers
        ]

    def read(self, key: str) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """A chunk; None if its file is gone or damaged."""
        data = self.data(key)
        if data is None:
            return None
        part: list[tuple[torch.Tensor, torch.Tensor]] = torch.load(io.BytesIO(data), weights_only=True)
        return part

    def data(self, key: str) -> bytes | None:
        """The verified bytes of a chunk."""
        try:
            whole = self.path(key).read_bytes()
        except OSError:
            return None
        digest, data = whole[:_DIGEST_BYTES], whole[_DIGEST_BYTES:]
        if hashlib.sha256(data).digest() != digest:
            self.path(key).unlink(missing_ok=True)
            return None
        return data

    def write(self, key: str, part: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write a file under another name first, so that readers never see half of it."""
        buffer = io.BytesIO()
        torch.save(part, buffer)
        draft = self.draft(key)
        draft.write_bytes(hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())
        draft.replace(self.path(key))

    def draft(self, key: str) -> Path:
        """A name that no other process uses."""
        return self.folder / f"{key}.{os.getpid()}"
