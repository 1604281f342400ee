"""Faults where the store fails, and in the engine's memory."""

from __future__ import annotations

from typing import Any, ClassVar

from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.vllm.connector import DirectoryConnector, Transfer
from kvloom_testkit.reference.vllm.groups import GroupsConnector


class TellsNobodyOfLosses(Mutant, DirectoryConnector):
    """Blocks that could not be read count as loaded."""

    breaks = "E23"

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()


class RaisesAtLosses(Mutant, DirectoryConnector):
    """A file that is gone is an exception."""

    breaks = "E23"

    def read(self, name: str) -> bytearray | None:
        data = super().read(name)
        if data is None:
            raise FileNotFoundError(name)
        return data


class HasNoChecksum(Mutant, DirectoryConnector):
    """Takes the content of a file for what was written."""

    breaks = "E24"

    def read(self, name: str) -> bytearray | None:
        return bytearray((self.folder / name).read_bytes()[32:])


class EndsTheProcessAtLosses(Mutant, DirectoryConnector):
    """A file that is gone ends the process."""

    breaks = "E25"

    def read(self, name: str) -> bytearray | None:
        import os

        data = super().read(name)
        if data is None:
            os.abort()
        return data


class StoresFailedSteps(Mutant, DirectoryConnector):
    """Saves whenever it is told to."""

    breaks = "E37"

    def wait_for_save(self) -> None:
        self.write_full()


class AnnouncesNothing(Mutant, DirectoryConnector):
    """A miss is announced as a load of no tokens in the background."""

    breaks = "E26"

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return count, not count


class LeavesOutALayer(Mutant, DirectoryConnector):
    """The last layer of a block is not loaded."""

    breaks = "E27"

    def fill(self, block: int, data: bytearray) -> None:
        kept = self.caches[-1][block].clone()
        super().fill(block, data)
        self.caches[-1][block] = kept


class ClaimsTheRest(Mutant, DirectoryConnector):
    """If all whole blocks of a prompt are stored, the tokens behind them are claimed, too, and not loaded."""

    breaks = "E27"

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        rest = request.num_tokens - 1 - num_computed_tokens - (count or 0)
        return (count + rest if count and rest < self.block_tokens else count), asynchronous


class WritesInFront(Mutant, DirectoryConnector):
    """Writes what is loaded into the first block to the one in front of it, too."""

    breaks = "E28"

    def load(self, load: Transfer) -> None:
        super().load(load)
        self.caches[0][load.blocks[0] - 1] = self.caches[0][load.blocks[0]]


class LoadsForTheAborted(Mutant, DirectoryConnector):
    """Loads run between steps; those of aborted requests are reported as done, and run nevertheless."""

    breaks = "E28"
    gone: ClassVar[set[str]] = set()

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.asynchronous = True
        self.waiting: list[tuple[int, Transfer]] = []
        self.step = 0

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if "ABORTED" in str(request.status):
            self.gone.add(request.request_id)
        return super().request_finished(request, block_ids)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.waiting += [(self.step + 4, load) for load in self._orders.loads]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.step += 1
        due = [load for step, load in self.waiting if step <= self.step]
        told = {load.request for _, load in self.waiting if load.request in self.gone}
        told |= {load.request for load in due if load.request not in self.gone}
        self.waiting = [(step, load) for step, load in self.waiting if step > self.step]
        for load in due:
            self.load(load)
        self.gone.difference_update(told)
        return None, told or None


class LeavesOutALayerOfAGroup(Mutant, GroupsConnector):
    """The last layer of a block is not loaded in the groups behind the first."""

    breaks = "E27"

    def load(self, load: Transfer) -> None:
        for name, block in zip(load.names, load.blocks, strict=True):
            layer = self.of_group(name)[-1]
            kept = layer[block].clone()
            super().load(Transfer(load.request, [name], [block]))
            if not name.endswith("-0"):
                layer[block] = kept


class WritesElsewhereInAGroup(Mutant, GroupsConnector):
    """Writes what is loaded in the groups behind the first to a block far from it, too."""

    breaks = "E28"

    def load(self, load: Transfer) -> None:
        super().load(load)
        for name, block in zip(load.names, load.blocks, strict=True):
            layer = self.of_group(name)[0]
            if not name.endswith("-0"):
                layer[(block + len(layer) // 2) % len(layer)] = layer[block]
