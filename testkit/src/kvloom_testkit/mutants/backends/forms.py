"""Faults of the forms that exist for speed."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any

from kvloom import Buffer, Buffers, MappedBlob, ReadDone, Sink
from kvloom_testkit.mutants import Mutant
from kvloom_testkit.reference.backend import DirectoryBackend
from kvloom_testkit.reference.complete_backend import CompleteDirectoryBackend, Mapped


class SaysFilledBeforeItReads(Mutant, CompleteDirectoryBackend):
    """The memory's old content is verified instead."""

    breaks = "B13"

    def get_into(self, key: str, sink: Sink) -> bool:
        blob = self.get(key)
        if blob is None:
            return False
        memory = sink.reserve(len(blob))
        sink.filled(len(blob))
        memory[:] = blob
        return True


class NeverSaysFilled(Mutant, CompleteDirectoryBackend):
    """The caller never learns that all of it has arrived."""

    breaks = "B13"

    def get_into(self, key: str, sink: Sink) -> bool:
        blob = self.get(key)
        if blob is not None:
            sink.reserve(len(blob))[:] = blob
        return blob is not None


class TakesNoRoomForAMiss(Mutant, CompleteDirectoryBackend):
    """Treats any error of `reserve` as a miss."""

    breaks = "B13"

    def get_into(self, key: str, sink: Sink) -> bool:
        try:
            return super().get_into(key, sink)
        except Exception:
            return False


class ReservesForNothing(Mutant, CompleteDirectoryBackend):
    """Reserves memory for a blob that is not there."""

    breaks = "B13"

    def get_into(self, key: str, sink: Sink) -> bool:
        if not self.contains(key):
            sink.reserve(0)
        return super().get_into(key, sink)


class ReservesWholePages(Mutant, CompleteDirectoryBackend):
    """Reserves whole pages, and counts the rest of the last one as part of the blob."""

    breaks = "B13"

    def get_into(self, key: str, sink: Sink) -> bool:
        blob = self.get(key)
        if blob is None:
            return False
        padded = bytes(blob).ljust(-(-len(blob) // 4096) * 4096, b"\0")
        sink.reserve(len(padded))[:] = padded
        sink.filled(len(blob))
        return True


class FillsWhatItCan(Mutant, CompleteDirectoryBackend):
    """Fills what it can of a range that ends after the blob, and returns True."""

    breaks = "B14"

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        part = memoryview(self.get(key) or b"")[offset : offset + len(into)]
        into[: len(part)] = part
        return len(part) > 0


class RoundsTheOffset(Mutant, CompleteDirectoryBackend):
    """To a page."""

    breaks = "B14"

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        return super().get_range(key, offset - offset % 4096, into)


class MissesTheLastByte(Mutant, CompleteDirectoryBackend):
    """Off by one."""

    breaks = "B14"

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        blob = self.get(key)
        return blob is not None and offset + len(into) < len(blob) and super().get_range(key, offset, into)


class LeavesOutWhatIsNotThere(Mutant, DirectoryBackend):
    """Leaves missing keys out, so that later answers belong to other keys."""

    breaks = "B15"

    def get_many(self, keys: Sequence[str]) -> list[Buffer | None]:
        return [blob for key in keys if (blob := self.get(key)) is not None]


class AnswersInItsOwnOrder(Mutant, DirectoryBackend):
    """Like a query without an order."""

    breaks = "B15"

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        return [self.contains(key) for key in sorted(keys)]


class AnswersEachKeyOnce(Mutant, DirectoryBackend):
    """Answers once for a key that was asked about twice."""

    breaks = "B15"

    def get_many(self, keys: Sequence[str]) -> list[Buffer | None]:
        return [self.get(key) for key in dict.fromkeys(keys)]


class DeletesTheFirst(Mutant, DirectoryBackend):
    """Stops deleting at the first key that is absent."""

    breaks = "B15"

    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            if not self.contains(key):
                return
            self.delete(key)


class ForgetsOneVictim(Mutant, DirectoryBackend):
    """Deletes only the victim whose place the blob takes."""

    breaks = "B19"

    def put_over(self, key: str, blob: Buffers, victims: Sequence[str]) -> None:
        there = [victim for victim in victims if self.contains(victim)]
        self.delete_many(there[:1])
        self.put(key, blob)


class KeepsAVictimsTail(Mutant, DirectoryBackend):
    """Writes over the victim's file without truncating it."""

    breaks = "B19"

    def put_over(self, key: str, blob: Buffers, victims: Sequence[str]) -> None:
        there = [victim for victim in victims if self.contains(victim)]
        self.delete_many(there[1:])
        if not there:
            return self.put(key, blob)
        with self._file(there[0]).open("r+b") as file:
            file.writelines(blob)
        os.replace(self._file(there[0]), self._file(key))


class AsksForARangeOfNothing(Mutant, CompleteDirectoryBackend):
    """The range's last byte is before its first, which a server does not understand."""

    breaks = "B14"

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        if offset + len(into) - 1 < offset:
            raise ValueError(f"bytes={offset}-{offset + len(into) - 1}: not a range")
        return super().get_range(key, offset, into)


class FindsNothingAnywhere(Mutant, DirectoryBackend):
    """Finds an empty range beyond the end of a blob, as a slice does."""

    breaks = "B14"

    def get_range(self, key: str, offset: int, into: memoryview) -> bool:
        part = memoryview(self.get(key) or b"")[offset : offset + len(into)]
        if len(part) != len(into):
            return False
        into[:] = part
        return True


class AnswersOneByOne(Mutant, DirectoryBackend):
    """Returns a generator, which asks the store only when it is iterated."""

    breaks = "B15"

    def contains_many(self, keys: Sequence[str]) -> list[bool]:
        return (self.contains(key) for key in keys)  # type: ignore[return-value]


class BatchSaysNothingOfMissingBlobs(Mutant, CompleteDirectoryBackend):
    """Reports no outcome for missing blobs, so callers wait until the deadline."""

    breaks = "B50"

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        def tell(number: int, outcome: bool | Exception) -> None:
            if outcome is not False:
                done(number, outcome)

        super().get_many_into(requests, tell)


class BatchCountsWhatArrives(Mutant, CompleteDirectoryBackend):
    """Numbers outcomes in the order in which they arrive."""

    breaks = "B50"

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        outcomes: list[bool | Exception] = []
        super().get_many_into(requests, lambda number, outcome: outcomes.append(outcome))
        for number, outcome in enumerate(sorted(outcomes, key=lambda outcome: outcome is False)):
            done(number, outcome)


class BatchEndsWithARefusal(Mutant, CompleteDirectoryBackend):
    """Ends the batch at the first sink without room."""

    breaks = "B50"

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        for number, (key, sink) in enumerate(requests):
            done(number, self.get_into(key, sink))


class BatchReadsAKeyOnce(Mutant, CompleteDirectoryBackend):
    """Reads a key that was asked for twice only once, for the first request."""

    breaks = "B50"

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        first = {key: (number, sink) for number, (key, sink) in reversed(list(enumerate(requests)))}
        for key, (number, sink) in first.items():
            super().get_many_into([(key, sink)], lambda _, outcome, number=number: done(number, outcome))


class BatchReportsARefusalTwice(Mutant, CompleteDirectoryBackend):
    """Once when the sink raises, and again at the end."""

    breaks = "B50"

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        failed: list[tuple[int, Exception]] = []

        def tell(number: int, outcome: bool | Exception) -> None:
            done(number, outcome)
            if isinstance(outcome, Exception):
                failed.append((number, outcome))

        super().get_many_into(requests, tell)
        for number, error in failed:
            done(number, error)


class BatchGivesNeighbours(Mutant, CompleteDirectoryBackend):
    """Swaps two blobs of a batch."""

    breaks = "B50"

    def get_many_into(self, requests: Sequence[tuple[str, Sink]], done: ReadDone) -> None:
        keys = [key for key, _ in requests]
        swapped = list(zip([*keys[1:2], *keys[:1], *keys[2:]], [sink for _, sink in requests], strict=True))
        super().get_many_into(swapped, done)


class _NeverChanges(Mapped):
    def current(self) -> bool:
        return True


class MapSeesNoChange(Mutant, CompleteDirectoryBackend):
    """Never notices that a mapped blob has gone or changed."""

    breaks = "B51"

    def map(self, key: str, most_bytes: int) -> MappedBlob | None:
        return _NeverChanges(self._file(key)) if self.contains(key) else None


class _OnlyDeleted(Mapped):
    def current(self) -> bool:
        return self._path.exists()


class MapSeesNoNewBlob(Mutant, CompleteDirectoryBackend):
    """Does not notice that another blob has taken the place of a mapped one."""

    breaks = "B51"

    def map(self, key: str, most_bytes: int) -> MappedBlob | None:
        return _OnlyDeleted(self._file(key)) if self.contains(key) else None


class _Used(Mapped):
    def current(self) -> bool:
        return super().current() and self._path.stat().st_atime_ns == self._used

    def __init__(self, *path: Any) -> None:
        super().__init__(*path)
        self._used = self._path.stat().st_atime_ns


class MapTakesAUseForAChange(Mutant, CompleteDirectoryBackend):
    """Takes a noted use of a blob for a change, so that every process verifies it again."""

    breaks = "B51"

    def map(self, key: str, most_bytes: int) -> MappedBlob | None:
        return _Used(self._file(key)) if self.contains(key) else None


class _Everybodys(Mapped):
    def __init__(self, *path: Any) -> None:
        super().__init__(*path)
        with self._path.open("r+b") as file:
            self.view = memoryview(mmap.mmap(file.fileno(), 0))

    def current(self) -> bool:
        status = os.stat(self._path) if self._path.exists() else None
        return status is not None and status.st_ino == self._was[0]


class MapIsTheStoresOwn(Mutant, CompleteDirectoryBackend):
    """A write to the memory is one to the file."""

    breaks = "B51"

    def map(self, key: str, most_bytes: int) -> MappedBlob | None:
        return _Everybodys(self._file(key)) if self.contains(key) else None


class MapHasNoBound(Mutant, CompleteDirectoryBackend):
    """Maps a blob of any length."""

    breaks = "B51"

    def map(self, key: str, most_bytes: int) -> MappedBlob | None:
        return super().map(key, sys.maxsize)


class MapOfNothingFails(Mutant, CompleteDirectoryBackend):
    """The file is opened, and is not there."""

    breaks = "B51"

    def map(self, key: str, most_bytes: int) -> MappedBlob | None:
        return Mapped(self._file(key))


class _WholePages(Mapped):
    def __init__(self, *path: Any) -> None:
        super().__init__(*path)
        self.view = memoryview(bytearray(self.view) + bytearray(-len(self.view) % 4096))


class MapHasWholePages(Mutant, CompleteDirectoryBackend):
    """Returns the whole pages of the mapping, not the bytes of the blob."""

    breaks = "B51"

    def map(self, key: str, most_bytes: int) -> MappedBlob | None:
        return _WholePages(self._file(key)) if self.contains(key) else None


class MapIsGoneWithTheOthers(Mutant, CompleteDirectoryBackend):
    """Closing one closes all."""

    breaks = "B51"

    def map(self, key: str, most_bytes: int) -> MappedBlob | None:
        mapped = super().map(key, most_bytes)
        if mapped is not None:
            every = self.__dict__.setdefault("_every", [])
            every.append(mapped)
            mapped.close = lambda: [one.view.__setitem__(slice(None), bytes(len(one.view))) for one in every]  # type: ignore[method-assign, assignment]
        return mapped


class MapsAreCurrentTogether(Mutant, CompleteDirectoryBackend):
    """One that has changed makes all be asked for anew."""

    breaks = "B57"

    def current_many(self, blobs: Sequence[MappedBlob]) -> list[bool]:
        return [all(super().current_many(blobs))] * len(blobs)


class MapsAreAskedAboutOnce(Mutant, CompleteDirectoryBackend):
    """The same blob is the same question."""

    breaks = "B57"

    def current_many(self, blobs: Sequence[MappedBlob]) -> list[bool]:
        return super().current_many([*dict.fromkeys(blobs)])


class MapsOnlyWhatIsThere(Mutant, CompleteDirectoryBackend):
    """Leaves out what cannot be mapped."""

    breaks = "B58"

    def map_many(self, requests: Sequence[tuple[str, int]]) -> list[MappedBlob | None]:
        return [one for one in super().map_many(requests) if one is not None]


class MapsWithOneBound(Mutant, CompleteDirectoryBackend):
    """Takes the largest bound for all."""

    breaks = "B58"

    def map_many(self, requests: Sequence[tuple[str, int]]) -> list[MappedBlob | None]:
        most = max([bound for _, bound in requests], default=0)
        return super().map_many([(key, most) for key, _ in requests])


class MapsEachKeyOnce(Mutant, CompleteDirectoryBackend):
    """The same key is the same memory."""

    breaks = "B58"

    def map_many(self, requests: Sequence[tuple[str, int]]) -> list[MappedBlob | None]:
        found = dict(zip([key for key, _ in requests], super().map_many(requests), strict=True))
        return [found[key] for key, _ in requests]
