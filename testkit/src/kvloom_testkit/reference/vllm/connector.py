"""A KV connector of vLLM that keeps each block in a file of one directory, by the shortest way that is right.

It is written from vLLM's documentation and base class, and imports nothing of kvloom. It serves models whose KV is in
one group.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

_DIGEST_BYTES = 32


@dataclass(frozen=True)
class Transfer:
    """Blocks of a request that go to or come from files: names of files, and numbers of blocks."""

    request: str
    names: Sequence[str]
    blocks: Sequence[int]


@dataclass
class Metadata(KVConnectorMetadata):
    """The worker's orders in one step."""

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)


@dataclass
class _Known:
    """A request, the blocks that it has, and how many of them are stored or known to be."""

    request: Any
    blocks: list[int] = field(default_factory=list)
    stored: int = 0


class DirectoryConnector(KVConnectorBase_V1):
    """`kv_connector_extra_config`: `path`, the directory; `asynchronous`, true to load between steps."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.asynchronous = bool(extra.get("asynchronous", False))
        self.block_tokens = vllm_config.cache_config.block_size
        self.folder = Path(extra["path"]) / self.fingerprint(vllm_config, kv_cache_config)
        self.folder.mkdir(parents=True, exist_ok=True)
        # The scheduler's side.
        self.known: dict[str, _Known] = {}
        self.begins: dict[str, int] = {}
        self.loads: list[Transfer] = []
        # The worker's side.
        self.caches: list[torch.Tensor] = []
        self.bad: set[int] = set()
        self.loading: dict[str, Future[None]] = {}
        self.threads = ThreadPoolExecutor(1) if role == KVConnectorRole.WORKER else None

    def fingerprint(self, vllm_config: Any, kv_cache_config: Any) -> str:
        """A name for all that decides which numbers a block has, apart from its tokens."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        what = {
            "model": model.model, "dtype": str(model.dtype), "cache": str(vllm_config.cache_config.cache_dtype),
            "block": self.block_tokens, "groups": [str(one) for one in kv_cache_config.kv_cache_groups],
            "ranks": parallel.world_size, "rank": parallel.rank,
        }  # fmt: skip
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

    # -- the scheduler's side ------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Keep the request: its hashes grow with its tokens."""
        self.known[request.request_id] = _Known(request)

    def name(self, request: Any, block: int) -> str:
        """The file of a block. vLLM's hash covers the tokens up to its end, salt, adapter and images."""
        return bytes(request.block_hashes[block]).hex()

    def has(self, name: str) -> bool:
        """Return whether a block is stored."""
        return (self.folder / name).exists()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Blocks in files behind those that vLLM has; at least one token of the prompt is left to compute."""
        begin = num_computed_tokens // self.block_tokens
        end = min((request.num_tokens - 1) // self.block_tokens, len(request.block_hashes))
        count = self.found(request, begin, end)
        self.begins[request.request_id] = begin
        return count * self.block_tokens, self.asynchronous and count > 0

    def found(self, request: Any, begin: int, end: int) -> int:
        """The number of blocks from `begin` on that are stored without a gap."""
        for block in range(begin, end):
            if not self.has(self.name(request, block)):
                return block - begin
        return max(end - begin, 0)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the load of what was promised. The blocks of `blocks` begin with those that vLLM has itself."""
        if num_external_tokens:
            begin = self.begins[request.request_id]
            end = begin + num_external_tokens // self.block_tokens
            names = [self.name(request, block) for block in range(begin, end)]
            self.loads.append(Transfer(request.request_id, names, self.targets(blocks.get_block_ids()[0], begin, end)))
            self.known[request.request_id].stored = end

    def targets(self, blocks: Sequence[int], begin: int, end: int) -> Sequence[int]:
        """The numbers of the blocks to load, of all that a request has."""
        return blocks[begin:end]

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """The step's orders: loads that were promised, and saves of blocks that are full when the step is done."""
        meta = Metadata(self.loads)
        self.loads = []
        for new in scheduler_output.scheduled_new_reqs:
            known = self.known[new.req_id]
            known.blocks = list(new.block_ids[0])
            computed = new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            self.save(meta, known, computed)
        cached = scheduler_output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            known = self.known[name]
            more = cached.new_block_ids[index]
            self.extend(known, list(more[0]) if more else [], resumed=name in cached.resumed_req_ids)
            computed = cached.num_computed_tokens[index] + scheduler_output.num_scheduled_tokens[name]
            self.save(meta, known, computed)
        return meta

    def extend(self, known: _Known, blocks: list[int], *, resumed: bool) -> None:
        """Note new blocks of a request; of one that comes back from preemption they are all that it has."""
        known.blocks = blocks if resumed else known.blocks + blocks

    def save(self, meta: Metadata, known: _Known, computed: int) -> None:
        """Order the saves of a request of which `computed` tokens are computed after this step."""
        full = min(computed // self.block_tokens, len(known.request.block_hashes), len(known.blocks))
        names = {self.name(known.request, block): known.blocks[block] for block in range(known.stored, full)}
        lacking = {name: block for name, block in names.items() if not self.has(name)}
        if lacking:
            meta.saves.append(Transfer(known.request.request_id, list(lacking), list(lacking.values())))
        known.stored = max(known.stored, full)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request. Its blocks may go: they were copied in the step that filled them."""
        self.known.pop(request.request_id, None)
        self.begins.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool | None:
        """Remove the files."""
        for path in list(self.folder.iterdir()):
            path.unlink(missing_ok=True)
        return True

    # -- the worker's side ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep the layers' memory, in which the first dimension is the block."""
        self.caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what was promised for this step, or begin to."""
        for load in self._orders.loads:
            if self.asynchronous and self.threads is not None:
                self.loading[load.request] = self.threads.submit(self.load, load)
            else:
                self.load(load)

    @property
    def _orders(self) -> Metadata:
        meta = self._get_connector_metadata()
        assert isinstance(meta, Metadata)
        return meta

    def load(self, load: Transfer) -> None:
        """Fill blocks from their files, up to the first that cannot be read."""
        for number, (name, block) in enumerate(zip(load.names, load.blocks, strict=True)):
            data = self.read(name)
            if data is None:
                self.bad.update(load.blocks[number:])
                return
            self.fill(block, data)

    def read(self, name: str) -> bytearray | None:
        """The bytes of a block; None if they are gone or damaged, which makes it a miss."""
        try:
            data = bytearray((self.folder / name).read_bytes())
        except OSError:
            return None
        if hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
            (self.folder / name).unlink(missing_ok=True)
            return None
        return data[_DIGEST_BYTES:]

    def fill(self, block: int, data: bytearray) -> None:
        """Copy the bytes of a block, layer by layer, into vLLM's memory."""
        offset = 0
        for cache in self.caches:
            page = cache[block]
            size = page.numel() * page.element_size()
            page.copy_(torch.frombuffer(data, dtype=page.dtype, count=page.numel(), offset=offset).view(page.shape))
            offset += size

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads of this step are done in `start_load_kv`."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are saved whole, when the step is done."""

    def wait_for_save(self) -> None:
        """Write the blocks that are full now. vLLM calls this on its way out of a step that raised, too."""
        if sys.exc_info()[0] is None:
            self.write_full()

    def write_full(self) -> None:
        """Write the blocks that are full after this step."""
        for save in self._orders.saves:
            for name, block in zip(save.names, save.blocks, strict=True):
                self.write(name, b"".join(self.pages(block)))

    def pages(self, block: int) -> Iterable[bytes]:
        """The bytes of a block, layer by layer."""
        for cache in self.caches:
            yield cache[block].contiguous().view(torch.uint8).numpy().tobytes()

    def write(self, name: str, data: bytes) -> None:
        """Write a file under another name first, so that readers never see half of it."""
        draft = self.folder / f"{name}.{os.getpid()}.{threading.get_ident()}"
        draft.write_bytes(hashlib.sha256(data).digest() + data)
        draft.replace(self.folder / name)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads in the background are done."""
        done = {name for name, one in self.loading.items() if one.done()}
        for name in done:
            self.loading.pop(name).result()
        return None, done or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were promised and could not be loaded."""
        bad, self.bad = self.bad, set()
        return bad

    def shutdown(self) -> None:
        """End the thread."""
        if self.threads is not None:
            self.threads.shutdown()
