"""Faults in what is given back."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.vllm.connector import DirectoryConnector, Transfer


class ExtendsTheResumed(Mutant, DirectoryConnector):
    """The blocks of a request that comes back from preemption are appended to those that it had."""

    breaks = "E12"

    def extend(self, known: Any, blocks: list[int], *, resumed: bool) -> None:
        super().extend(known, blocks, resumed=False)


class SavesInTheBackground(Mutant, DirectoryConnector):
    """Blocks are copied a little after the step that filled them, though they may have been given back by then."""

    breaks = "E12"

    def wait_for_save(self) -> None:
        threading.Timer(0.02, self.write_blocks, (self._orders.saves,)).start()

    def write_blocks(self, saves: list[Transfer]) -> None:
        for save in saves:
            for name, block in zip(save.names, save.blocks, strict=True):
                self.write(name, b"".join(self.pages(block)))


class HoldsTheAborted(Mutant, DirectoryConnector):
    """Blocks of an aborted request are held for a store that never begins."""

    breaks = "E13"

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished(request, block_ids)
        return "ABORTED" in str(request.status), None


class HoldsOneInTwenty(Mutant, DirectoryConnector):
    """Now and then the blocks of a request are held for ever."""

    breaks = "E14"
    ended: ClassVar[int] = 0

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished(request, block_ids)
        type(self).ended += 1
        return type(self).ended % 20 == 0, None


class LeavesFilesOpen(Mutant, DirectoryConnector):
    """A file is opened for each request."""

    breaks = "E15"
    open: ClassVar[list[Any]] = []

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self.open.append(open("/dev/null"))  # noqa: SIM115


class ResetsInWordsOnly(Mutant, DirectoryConnector):
    """It says that it was reset."""

    breaks = "E16"

    def reset_cache(self) -> bool | None:
        return True


class WritesAfterResets(Mutant, DirectoryConnector):
    """Copies are taken in the step and written later, also where a reset came between."""

    breaks = "E16"

    def write(self, name: str, data: bytes) -> None:
        threading.Timer(0.3, super().write, (name, data)).start()
