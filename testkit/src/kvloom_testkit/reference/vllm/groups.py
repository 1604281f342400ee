"""The reference connector for models whose KV is in several groups: full attention, sliding windows and states.

It is written from vLLM's documentation and base class, as `connector` is, and as short.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from kvloom_testkit.reference.vllm.connector import DirectoryConnector, Metadata, Transfer

_NULL = 0
"""The number of the block that stands for those that vLLM does not keep."""


class GroupsConnector(DirectoryConnector, SupportsHMA):
    """A block is a file for each group. `kv_connector_extra_config`: `path`, the directory."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.groups = [one.kv_cache_spec for one in kv_cache_config.kv_cache_groups]
        self.layers = [list(one.layer_names) for one in kv_cache_config.kv_cache_groups]
        self.kinds = [type(one).__name__ for one in self.groups]
        if unknown := set(self.kinds) - {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "MambaSpec"}:
            raise ValueError(f"groups of {', '.join(sorted(unknown))} are not served")
        # vLLM copies the state that a request goes on from before it asks for loads of the same step.
        self.asynchronous = self.asynchronous or "MambaSpec" in self.kinds
        self.layer_caches: dict[str, torch.Tensor] = {}
        self.tables: dict[str, list[list[int]]] = {}
        """The blocks of each request, by group."""

    # -- the scheduler's side ------------------------------------------------------------------------------------------

    def first(self, group: int, end: int) -> int:
        """The first block that the token behind `end` blocks needs of a group."""
        if self.kinds[group] == "MambaSpec":
            return end - 1
        if self.kinds[group] == "SlidingWindowSpec":
            return max(0, end * self.block_tokens + 1 - self.groups[group].sliding_window) // self.block_tokens
        return 0

    def found(self, request: Any, begin: int, end: int) -> int:
        """The largest number of blocks at whose end every group has what it needs, in files or in vLLM's memory."""
        for last in range(end, begin, -1):
            if all(self.has(name) for _, name, _ in self.needed(request, begin, last)):
                return last - begin
        return 0

    def needed(self, request: Any, begin: int, end: int) -> Iterable[tuple[int, str, int]]:
        """Group, file and number in the request of each block that a hit from `begin` to `end` loads."""
        for group in range(len(self.groups)):
            for block in range(max(begin, self.first(group, end)), end):
                yield group, f"{self.name(request, block)}-{group}", block

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the load of what was promised, and note the blocks."""
        self.tables[request.request_id] = [list(one) for one in blocks.get_block_ids()]
        if num_external_tokens:
            begin = self.begins[request.request_id]
            end = begin + num_external_tokens // self.block_tokens
            rows = list(self.needed(request, begin, end))
            names, ids = [name for _, name, _ in rows], [self.target(request, group, block) for group, _, block in rows]
            self.loads.append(Transfer(request.request_id, names, ids))
            self.known[request.request_id].stored = end

    def target(self, request: Any, group: int, block: int) -> int:
        """The number in vLLM's memory of a block of a request."""
        return self.tables[request.request_id][group][block]

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """The step's orders; a state is saved where vLLM says that a block has one."""
        meta, self.loads = Metadata(self.loads), []
        after: dict[str, int] = {}
        for new in scheduler_output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(one) for one in new.block_ids]
            after[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            for group, more in enumerate(cached.new_block_ids[index] or ()):
                kept = [] if name in cached.resumed_req_ids else self.tables[name][group]
                self.tables[name][group] = kept + list(more)
            after[name] = cached.num_computed_tokens[index]
        for name, computed in after.items():
            self.save_full(meta, name, computed + scheduler_output.num_scheduled_tokens[name])
        told = getattr(scheduler_output, "kv_connector_block_state", None)
        for name, states in (told.boundary_state_offloads if told is not None else {}).items():
            for group, block, tokens in states:
                self.save_one(meta, name, group, tokens // self.block_tokens - 1, block)
        return meta

    def save_full(self, meta: Metadata, name: str, computed: int) -> None:
        """Order the saves of attention's blocks of which all tokens are computed after this step."""
        known = self.known[name]
        full = min(computed // self.block_tokens, len(known.request.block_hashes))
        for group, kind in enumerate(self.kinds):
            if kind != "MambaSpec":
                for block in range(known.stored, full):
                    self.save_one(meta, name, group, block, self.tables[name][group][block])
        known.stored = max(known.stored, full)

    def save_one(self, meta: Metadata, name: str, group: int, block: int, number: int) -> None:
        """Order the save of one block of a group, if vLLM has it and it is not stored."""
        known = self.known.get(name)
        if number == _NULL or known is None or block >= len(known.request.block_hashes):
            return
        file = f"{self.name(known.request, block)}-{group}"
        if not self.has(file):
            meta.saves.append(Transfer(name, [file], [number]))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, Any]:
        """Forget the request."""
        self.tables.pop(request.request_id, None)
        return self.request_finished(request, block_ids[0])

    # -- the worker's side ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep the memory of each layer by its name."""
        self.layer_caches = kv_caches

    def load(self, load: Transfer) -> None:
        """Fill the blocks of each group, up to the first that cannot be read."""
        for name, block in zip(load.names, load.blocks, strict=True):
            self.caches = self.of_group(name)
            super().load(Transfer(load.request, [name], [block]))

    def of_group(self, name: str) -> list[torch.Tensor]:
        """The memory of the layers whose blocks a file has."""
        return [self.layer_caches[layer] for layer in self.layers[int(name.rpartition("-")[2])]]

    def write_full(self) -> None:
        """Write the blocks that are full after this step."""
        for save in self._orders.saves:
            for name, block in zip(save.names, save.blocks, strict=True):
                self.caches = self.of_group(name)
                self.write(name, b"".join(self.pages(block)))
