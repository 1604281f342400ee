"""Memory that an engine's worker and its scheduler share: a file of slots for each rank, and the owners of slots."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import secrets
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_PAGE = 4096
_MAGIC = b"kvlstag1"
_SHM = Path("/dev/shm")


def staging_path(engine_id: str, rank: int) -> Path:
    """The path of a rank's file: in shared memory, or in the temporary directory where there is none."""
    folder = _SHM if _SHM.is_dir() and os.access(_SHM, os.W_OK) else Path(tempfile.gettempdir())
    name = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in engine_id)
    return folder / f"kvloom-{os.getuid()}-{name[:100]}-{rank}"


class Staging:
    """One rank's slots. The worker creates the file, the scheduler opens it and removes its name.

    `data`, uint8 `[slots, slot_bytes]`; `stamps`, int64 `[slots]`: which order of the scheduler's the worker carried
    out last on each slot, negative if it failed; `about`, what the worker says of its pages, JSON values; `nonce`,
    which file this is.
    """

    def __init__(self, path: Path, file: int) -> None:
        self.path = path
        self._inode = os.fstat(file).st_ino
        self._map = mmap.mmap(file, 0)
        size = int.from_bytes(self._map[len(_MAGIC) : 16], "little")
        header = json.loads(self._map[16 : 16 + size])
        self.about: Mapping[str, Any] = header["about"]
        self.nonce: str = header["nonce"]
        self.slots, self.slot_bytes = int(header["slots"]), int(header["slot_bytes"])
        stamps_at = _aligned(16 + size)
        data_at = stamps_at + _aligned(8 * self.slots)
        self.stamps = torch.frombuffer(self._map, dtype=torch.int64, count=self.slots, offset=stamps_at)
        count = self.slots * self.slot_bytes
        self.data = torch.frombuffer(self._map, dtype=torch.uint8, count=count, offset=data_at).view(self.slots, -1)

    @classmethod
    def create(cls, path: Path, *, slots: int, slot_bytes: int, about: Mapping[str, Any]) -> Staging:
        """A new file in place of one that a process left behind. All of its memory is taken now, or OSError is raised.

        slots and slot_bytes: at least 1.
        """
        nonce = secrets.token_hex(16)
        header = json.dumps({"slots": slots, "slot_bytes": slot_bytes, "nonce": nonce, "about": about}).encode()
        stamps_at = _aligned(16 + len(header))
        size = stamps_at + _aligned(8 * slots) + slots * slot_bytes
        unfinished = path.with_name(f"{path.name}.{nonce[:8]}")
        file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        inode = os.fstat(file).st_ino
        try:
            os.posix_fallocate(file, 0, size)  # a page that cannot be had later would end the process
            os.pwrite(file, _MAGIC + len(header).to_bytes(8, "little") + header, 0)
            staging = cls(path, file)
            weakref.finalize(staging, _remove, path, inode)  # should the scheduler never come
            os.replace(unfinished, path)
        except BaseException as error:  # Ctrl-C, too: the memory would be taken until the machine starts anew
            _remove(unfinished, inode)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                text = f"{path.parent} has no {size} bytes left; make it larger (docker: --shm-size) or `staging` less"
                raise OSError(error.errno, text) from error
            raise
        finally:
            os.close(file)
        return staging

    @classmethod
    def open(cls, path: Path) -> Staging:
        """Open a worker's file. FileNotFoundError if there is none; PermissionError if it belongs to another user."""
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(file).st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to another user")
            if os.pread(file, len(_MAGIC), 0) != _MAGIC:
                raise ValueError(f"{path} is not a file of slots")
            return cls(path, file)
        finally:
            os.close(file)

    def unlink(self) -> None:
        """Remove the name; the memory goes with the last process that has it. Twice is fine."""
        _remove(self.path, self._inode)


@dataclass(eq=False, slots=True)
class Held:
    """A slot in use. `ready`: its bytes are those of `key`; `pins`: how many use it; `jobs`: how many workers' jobs."""

    key: bytes
    slot: int
    pins: int = 1
    jobs: int = 0
    ticket: int = 0
    """The last order to the workers that names it."""
    ready: bool = False
    promised: int = -1
    """The step in which the engine was told that it can be loaded."""
    dropped: bool = False


class Slots:
    """Assigns slots to owners. Not thread-safe.

    A slot has one owner. It gets another owner only if it is ready, not pinned, and not promised in the step under way.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._held: dict[bytes, Held] = {}
        self._idle: OrderedDict[bytes, Held] = OrderedDict()
        self.step = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: bytes) -> Held | None:
        return self._held.get(key)

    def take(self, key: bytes) -> Held | None:
        """A slot for a key that has none, pinned once and not ready; None if none can be had."""
        if key in self._held:
            raise KeyError("it has a slot already")
        if not self._free:
            oldest = next((held for held in self._idle.values() if held.promised != self.step), None)
            if oldest is None:
                return None
            self.drop(oldest)
        held = self._held[key] = Held(key, self._free.pop())
        return held

    def promise(self, held: Held) -> None:
        """It stays until the step is over, and is the most recently used."""
        held.promised = self.step
        if held.key in self._idle:
            self._idle.move_to_end(held.key)

    def pin(self, held: Held) -> None:
        held.pins += 1
        if not held.dropped:
            self._idle.pop(held.key, None)

    def unpin(self, held: Held) -> None:
        held.pins -= 1
        assert held.pins >= 0
        if held.pins:
            return
        if held.dropped or not held.ready:
            self.drop(held)
            self._free.append(held.slot)
        else:
            self._idle[held.key] = held

    def drop(self, held: Held) -> None:
        """Hide the slot; it is free once it is unused."""
        if held.dropped:
            return
        held.dropped = True
        self._held.pop(held.key)
        if self._idle.pop(held.key, None) is not None:
            self._free.append(held.slot)

    def all(self) -> list[Held]:
        return list(self._held.values())


def _remove(path: Path, inode: int) -> None:
    with contextlib.suppress(OSError):
        if path.stat(follow_symlinks=False).st_ino == inode:  # else a later process has made it anew
            path.unlink()


def _aligned(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
