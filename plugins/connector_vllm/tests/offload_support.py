"""Tiers behind vLLM's offloading, with workers and an engine that are only pretended."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvloom import EngineConfig, KVSpec
from kvloom_connector_vllm.offload.copy import Blocks, Copier, Order
from kvloom_connector_vllm.offload.settings import PieceGeometry
from kvloom_connector_vllm.offload.store import OffloadStore
from kvloom_connector_vllm.offload.tiers import Found, Tiers
from kvloom_connector_vllm.staging import Staging

SPEC = KVSpec(model="m", num_layers=1, num_kv_heads=1, head_size=1, dtype="uint8")
BYTES = (96, 64)
"""Sizes of a piece in each rank."""
BLOCKS = 64
KEYS = [b"%032d" % number for number in range(200)]


def content(key: bytes, rank: int) -> torch.Tensor:
    """The content of a block under this key."""
    data = hashlib.sha256(b"%d" % rank + key).digest() * 4
    return torch.frombuffer(bytearray(data[: BYTES[rank]]), dtype=torch.uint8)


class Pretended:
    """An engine of two ranks, over tiers in a folder. What a block is to hold follows from its key."""

    def __init__(self, folder: Path, *, slots: int = 8, tiers: Any = None, **more: Any) -> None:
        folder.mkdir(exist_ok=True)
        config = EngineConfig.load({"tiers": tiers or [{"type": "disk", "path": str(folder / "kv")}]})
        self.tiers = Tiers(config, SPEC, PieceGeometry(piece_bytes=list(BYTES)), timeout=5.0)
        self.files = [
            Staging.create(folder / f"rank-{rank}", slots=slots, slot_bytes=size, about={})
            for rank, size in enumerate(BYTES)
        ]
        self.memory = [torch.zeros(BLOCKS, size, dtype=torch.uint8) for size in BYTES]
        self.copiers = [
            Copier(file, [[pages]], chunk_blocks=1, rank=rank)
            for rank, (file, pages) in enumerate(zip(self.files, self.memory, strict=True))
        ]
        self.store = OffloadStore(self.tiers, [Staging.open(file.path) for file in self.files], **more)

    def copy(self, verb: str, order: Order, blocks: Sequence[int]) -> None:
        for copier in self.copiers:
            getattr(copier, verb)(order, Blocks(list(blocks), [len(blocks)], [0]))

    def put(self, keys: Sequence[bytes]) -> list[bytes]:
        """Compute and store; what was accepted."""
        prepared = self.store.prepare_store(keys)
        if prepared is None:
            return []
        accepted, order = prepared
        for block, key in enumerate(accepted):
            for rank, pages in enumerate(self.memory):
                pages[block] = content(key, rank)
        self.copy("store", order, range(len(accepted)))
        self.store.complete_store(accepted)
        return accepted

    def look(self, keys: Sequence[bytes], request: str = "r") -> list[Found]:
        """Look up step by step, like a scheduler, until all answers are known."""
        until = time.monotonic() + 20
        while True:
            found = [self.store.lookup(key, request) for key in keys]
            if not {Found.ASKED, Found.COMING} & set(found):
                return found
            self.store.end_step()
            assert time.monotonic() < until, "it is never known"
            time.sleep(0.001)

    def get(self, keys: Sequence[bytes]) -> None:
        """Load hits, and see that they are what they should be."""
        order = self.store.prepare_load(keys)
        self.store.end_step()
        for pages in self.memory:
            pages.fill_(0)
        self.copy("load", order, range(len(keys)))
        self.store.complete_load(keys)
        for block, key in enumerate(keys):
            for rank, pages in enumerate(self.memory):
                assert torch.equal(pages[block], content(key, rank))

    def settled(self) -> None:
        """All saves are over: every slot is free, or could be."""
        self.store._writes.submit(lambda: None).result(10)


Make = Callable[..., Pretended]
