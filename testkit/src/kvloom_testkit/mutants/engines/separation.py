"""Faults in what must not meet."""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path
from typing import Any

from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.vllm.connector import DirectoryConnector


def _of_tokens(connector: DirectoryConnector, request: Any, block: int, *more: object) -> str:
    tokens = list(request.all_token_ids[: (block + 1) * connector.block_tokens])
    return hashlib.sha256(repr((tokens, more)).encode()).hexdigest()


def _content(path: Path) -> bytearray | None:
    try:
        return bytearray(path.read_bytes())
    except OSError:
        return None


class KeysWithoutSalt(Mutant, DirectoryConnector):
    """Keys cover tokens and adapter."""

    breaks = "E17"

    def name(self, request: Any, block: int) -> str:
        return _of_tokens(self, request, block, request.lora_request and request.lora_request.lora_path)


class KeysWithoutAdapter(Mutant, DirectoryConnector):
    """Keys cover tokens and salt."""

    breaks = "E18"

    def name(self, request: Any, block: int) -> str:
        return _of_tokens(self, request, block, request.cache_salt)


class KeysOfThisProcess(Mutant, DirectoryConnector):
    """Keys are made by `hash()`."""

    breaks = "E19"

    def name(self, request: Any, block: int) -> str:
        return f"{hash(super().name(request, block)) % 2**64:x}"


class KeysWithoutModel(Mutant, DirectoryConnector):
    """One directory for all models of a shape."""

    breaks = "E20"

    def fingerprint(self, vllm_config: Any, kv_cache_config: Any) -> str:
        return f"{vllm_config.model_config.dtype}-{self.block_tokens}"


class KeysWithoutType(Mutant, DirectoryConnector):
    """One directory for all types of a model."""

    breaks = "E21"

    def fingerprint(self, vllm_config: Any, kv_cache_config: Any) -> str:
        model = hashlib.sha256(vllm_config.model_config.model.encode()).hexdigest()
        return f"{model}-{self.block_tokens}"


class KeysByPosition(Mutant, DirectoryConnector):
    """Keys cover the tokens up to a block's end, and not how many of them are in the block; what is short is padded."""

    breaks = "E22"

    def fingerprint(self, vllm_config: Any, kv_cache_config: Any) -> str:
        model = vllm_config.model_config
        return hashlib.sha256(f"{model.model}-{model.dtype}".encode()).hexdigest()

    def name(self, request: Any, block: int) -> str:
        lora = request.lora_request and request.lora_request.lora_path
        return _of_tokens(self, request, block, request.cache_salt, lora)

    def fill(self, block: int, data: bytearray) -> None:
        size = sum(cache[block].numel() * cache.element_size() for cache in self.caches)
        super().fill(block, data.ljust(size, b"\0"))


class OneDraftForAll(Mutant, DirectoryConnector):
    """Files are drafted under one name, which every process uses."""

    breaks = "E32"

    def write(self, name: str, data: bytes) -> None:
        draft = self.folder / "draft"
        draft.write_bytes(hashlib.sha256(data).digest() + data)
        time.sleep(0.002)
        draft.replace(self.folder / name)


class OneDraftForEachFile(Mutant, DirectoryConnector):
    """The draft of a file has one name, which every process uses that writes the same block."""

    breaks = "E32"

    def write(self, name: str, data: bytes) -> None:
        draft = self.folder / f"{name}.draft"
        draft.write_bytes(hashlib.sha256(data).digest() + data)
        draft.replace(self.folder / name)


class TrustsDraftsOfOthers(Mutant, DirectoryConnector):
    """The same, but that another process was first is no error; and what is in a file is taken for what was written."""

    breaks = "E32"

    def write(self, name: str, data: bytes) -> None:
        draft = self.folder / f"{name}.draft"
        draft.write_bytes(data)
        with contextlib.suppress(FileNotFoundError):
            draft.replace(self.folder / name)

    def read(self, name: str) -> bytearray | None:
        return _content(self.folder / name)


class WritesInPlace(Mutant, DirectoryConnector):
    """A file is there before its bytes are, and what is in it is taken for all of it."""

    breaks = "E32"

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)

    def read(self, name: str) -> bytearray | None:
        return _content(self.folder / name)


class KeysWithoutRank(Mutant, DirectoryConnector):
    """Ranks write the same files, and the last one wins."""

    breaks = "E35"

    def fingerprint(self, vllm_config: Any, kv_cache_config: Any) -> str:
        return _of_model(vllm_config, vllm_config.parallel_config.world_size)


class KeysWithoutRanks(Mutant, DirectoryConnector):
    """One directory for any number of ranks."""

    breaks = "E36"

    def fingerprint(self, vllm_config: Any, kv_cache_config: Any) -> str:
        return _of_model(vllm_config)


def _of_model(vllm_config: Any, *more: object) -> str:
    model = vllm_config.model_config
    what = model.model, str(model.dtype), vllm_config.cache_config.block_size, more
    return hashlib.sha256(repr(what).encode()).hexdigest()
