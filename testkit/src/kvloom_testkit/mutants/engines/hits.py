"""Faults in what is found, and in the answers that come from it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.vllm.connector import DirectoryConnector, Metadata
from kvloom_testkit.reference.vllm.groups import GroupsConnector


class NeedsAnotherDevice(Mutant, DirectoryConnector):
    """It wants a device that is not there."""

    breaks = "E01"

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        raise RuntimeError("this connector needs a GPU")


class EndsTheProcessAtStart(Mutant, DirectoryConnector):
    """It ends the process."""

    breaks = "E01"

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        import os

        os._exit(3)


class HangsAtStart(Mutant, DirectoryConnector):
    """It waits for a server that never comes."""

    breaks = "E01"

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        time.sleep(3600)


class NeverEnds(Mutant, DirectoryConnector):
    """Shutting down waits for work that never comes."""

    breaks = "E02"

    def shutdown(self) -> None:
        time.sleep(3600)


class FindsAnything(Mutant, DirectoryConnector):
    """The first block of every prompt counts as stored."""

    breaks = "E03"

    def has(self, name: str) -> bool:
        return True

    def save(self, meta: Metadata, known: Any, computed: int) -> None:
        pass


class FindsNothing(Mutant, DirectoryConnector):
    """Nothing counts as stored."""

    breaks = "E04"

    def has(self, name: str) -> bool:
        return False


class ClaimsOneMore(Mutant, DirectoryConnector):
    """A hit is one block longer than what is stored, if the prompt is; the load then fails, and is computed."""

    breaks = "E05"

    def found(self, request: Any, begin: int, end: int) -> int:
        count = super().found(request, begin, end)
        return count + 1 if 0 < count < end - begin else count


class KeysOfBlocksAlone(Mutant, DirectoryConnector):
    """A key covers the tokens of a block and its place, and not those before it."""

    breaks = "E05"

    def name(self, request: Any, block: int) -> str:
        span = slice(block * self.block_tokens, (block + 1) * self.block_tokens)
        return hashlib.sha256(repr((block, list(request.all_token_ids[span]))).encode()).hexdigest()

    def found(self, request: Any, begin: int, end: int) -> int:
        return max([block + 1 - begin for block in range(begin, end) if self.has(self.name(request, block))], default=0)


class LoadsInReverse(Mutant, DirectoryConnector):
    """The last block is loaded into the first place."""

    breaks = "E06"

    def targets(self, blocks: Sequence[int], begin: int, end: int) -> Sequence[int]:
        return list(reversed(blocks[begin:end]))


class CountsFromTheFirst(Mutant, DirectoryConnector):
    """Blocks that vLLM had itself are overwritten, and those behind them left as they were."""

    breaks = "E07"

    def targets(self, blocks: Sequence[int], begin: int, end: int) -> Sequence[int]:
        return blocks[: end - begin]


class WrongAtFullHits(Mutant, DirectoryConnector):
    """Takes the last block from the one before where the hit ends one block before the end of the prompt."""

    breaks = "E08"

    def name(self, request: Any, block: int) -> str:
        full = block + 2 == request.num_prompt_tokens / self.block_tokens and request.request_id in self.begins
        return super().name(request, block - 1 if full and block else block)


class OneLoadAStep(Mutant, DirectoryConnector):
    """Of several requests in a step, only the last is loaded."""

    breaks = "E09"

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        meta = super().build_connector_meta(scheduler_output)
        meta.loads = meta.loads[-1:]
        return meta


class KeepsTheFirstList(Mutant, DirectoryConnector):
    """Blocks that come while a request decodes are not noted; the last of those it had is saved in their place."""

    breaks = "E10"

    def extend(self, known: Any, blocks: list[int], *, resumed: bool) -> None:
        super().extend(known, blocks if resumed else known.blocks[-1:] * len(blocks), resumed=resumed)


class SavesAhead(Mutant, DirectoryConnector):
    """A block is saved when it is allocated and its tokens are known, computed or not."""

    breaks = "E11"

    def save(self, meta: Metadata, known: Any, computed: int) -> None:
        super().save(meta, known, len(known.blocks) * self.block_tokens)


class TakesHalfForV(Mutant, DirectoryConnector):
    """Takes the second half of each page for V where there is one head, as with latents, which have no V."""

    breaks = "E29"

    def fill(self, block: int, data: bytearray) -> None:
        kept = [cache[block].clone() for cache in self.caches]
        super().fill(block, data)
        for cache, before in zip(self.caches, kept, strict=True):
            if cache.shape[1] == 1:
                half = cache.shape[-1] // 2
                cache[block][..., half:] = before[..., half:]


class TakesTheFirstGroup(Mutant, DirectoryConnector, SupportsHMA):
    """Takes groups of layers, and the first one's list of blocks for all of them."""

    breaks = "E30"

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, Any]:
        return self.request_finished(request, block_ids[0])


class TakesTheBlockBefore(Mutant, GroupsConnector):
    """Fills a state into the block before the one that the request goes on from."""

    breaks = "E31"

    def target(self, request: Any, group: int, block: int) -> int:
        return super().target(request, group, block - (self.kinds[group] == "MambaSpec"))
