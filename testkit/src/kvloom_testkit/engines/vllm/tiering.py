"""vLLM's tiers of offloaded KV on a machine without a GPU, which vLLM itself refuses: for `--secondary-tier`."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostTieringSpec(TieringOffloadingSpec):
    """Managers, tiers and host memory are vLLM's own; only the copies between blocks and host memory are the kit's."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of one rank."""
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id, num_chunks=self.num_chunks, kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            cpu_page_size=self.cpu_page_size_per_worker,
        )  # fmt: skip
        return HostWorker(kv_caches, region, self.blocks_per_chunk)


class HostWorker(OffloadingWorker):
    """Copies when it is asked to, and is done then. chunk_blocks: number of the engine's blocks in a chunk."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion, chunk_blocks: int) -> None:
        self._pages = [one.tensor for one in caches.tensors]
        self._rows = [region.create_next_worker_view(one.page_size_bytes * chunk_blocks) for one in caches.tensors]
        self._groups = caches.group_data_refs
        self._region, self._chunk_blocks = region, chunk_blocks
        self._done: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks to host memory."""
        for block, row in self._pairs(src_spec, dst_spec):
            row.copy_(block)
        self._done.append(job_id)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks from host memory."""
        for block, row in self._pairs(dst_spec, src_spec):
            block.copy_(row)
        self._done.append(job_id)
        return True

    def get_finished(self) -> list[TransferResult]:
        """All jobs since the last call."""
        done, self._done = self._done, []
        return [TransferResult(job, True) for job in done]

    def wait(self, job_ids: set[int]) -> None:
        """Nothing: jobs are done when they have been submitted."""

    def shutdown(self) -> None:
        """Give the host memory back."""
        self._rows.clear()
        self._region.cleanup()

    def _pairs(self, blocks: Any, chunks: Any) -> Any:
        """The bytes of each block and layer, and their place in host memory."""
        ids, rows = list(blocks.block_ids), list(chunks.block_ids)
        for layers, count, first in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            skip = first % self._chunk_blocks
            for number in range(count):
                chunk, place = divmod(skip + number, self._chunk_blocks)
                for layer in layers:
                    page, size = self._pages[layer.tensor_idx][ids[number]], layer.page_size_bytes
                    begin = place * page.shape[0]
                    yield page[:size], self._rows[layer.tensor_idx][rows[chunk]][begin : begin + size]
            ids, rows = ids[count:], rows[-(-(skip + count) // self._chunk_blocks) if count else 0 :]
