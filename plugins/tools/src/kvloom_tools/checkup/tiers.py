"""Each tier of a configuration, tried: room for it, what lies under a path, and a blob written, read and deleted."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloom import BackendError, DeadlineExceeded, IncompleteListingError, KVLoomError, get_at_most, output
from kvloom.inspection import Store, at_once, opened
from kvloom_tools.checkup.finding import Finding, note, ok, problem
from kvloom_tools.checkup.machine import available_bytes
from kvloom_tools.stores import for_a_try, remove_left

if TYPE_CHECKING:
    from kvloom.inspection import Resolved, TierChoice

PROBE = "doctor/"
"""Prefix of the keys that are written for a test and deleted after it."""
PROBE_BYTES = 1 << 20
DIRECTORY_SECONDS = 60.0
"""Time to look at a tier's directory and all that is in it: a network file system may never answer."""
_DIRECT_TYPE = "disk"
"""The backend that moves blobs by O_DIRECT."""
_FAR = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "ceph", "glusterfs"}


def looked_at(resolved: Resolved) -> Iterator[Finding]:
    for choice in resolved.tiers:
        if choice.backend is None:
            yield _memory(choice)
            continue
        path = getattr(choice.backend.config, "path", None)
        if isinstance(path, (str, Path)):
            yield from _in_time(choice, Path(path).expanduser())
        yield _tried(choice)
        yield from _listed(choice)


def _in_time(choice: TierChoice, path: Path) -> Iterator[Finding]:
    """`_directory`, or the problem that the file system does not answer or refuses."""
    look = ("", lambda: list(_directory(choice, path)))
    for _, found in at_once([look], seconds=DIRECTORY_SECONDS, threads=1):
        if isinstance(found, list):
            yield from found
        elif isinstance(found, DeadlineExceeded):
            yield problem("tier", choice.name, f"{path}: its file system did not answer in {DIRECTORY_SECONDS:g} s")
        elif isinstance(found, OSError):  # of a place that may not be looked at, or cannot be
            yield problem("tier", choice.name, f"{path}: {found.strerror}")
        else:
            raise found


def _memory(choice: TierChoice) -> Finding:
    capacity, available = choice.capacity or 0, available_bytes()
    if available is not None and capacity > available:
        text = f"capacity {output.size(capacity)}, and {output.size(available)} are free: lower it"
        return problem("tier", choice.name, text)
    return ok("tier", choice.name, f"capacity {output.size(capacity)}")


def _tried(choice: TierChoice) -> Finding:
    """Writes a blob, asks for it, reads it and deletes it, each within the tier's deadline."""
    key, blob = f"{PROBE}{os.getpid()}-{time.time():.0f}", os.urandom(PROBE_BYTES)
    try:
        with for_a_try(choice) as tried, opened(tried) as store:
            try:
                return _written(store, key, blob)
            finally:
                store.ask(lambda: store.backend.delete_many([key]))  # which removes what is empty then
    except KVLoomError as error:
        return problem("tier", choice.name, str(error))


def _listed(choice: TierChoice) -> Iterator[Finding]:
    """Report a bounded tier whose content cannot be counted completely."""
    if choice.write == "never" or (choice.capacity is None and not choice.quota):
        return
    try:
        with opened(choice, made=False) as store:
            deque(store.entries(), maxlen=0)
    except BackendError as error:
        if isinstance(error.__cause__, IncompleteListingError):
            text = f"{error.__cause__}; the tier does not grow until they can: change their owner, or remove them"
            yield problem("tier", choice.name, text)
    except KVLoomError:
        return  # said already


def _written(store: Store, key: str, blob: bytes) -> Finding:
    backend, began = store.backend, time.monotonic()
    if store.choice.write != "never":
        if not backend.bounded:  # one that is evicts what is left there by itself
            with contextlib.suppress(BackendError):  # of a listing, which is looked at by itself
                remove_left(store, PROBE)
        began = time.monotonic()
        store.ask(lambda: backend.put(key, [blob]))
        written = time.monotonic()
        found = store.ask(lambda: get_at_most(backend, key, len(blob)))
        read = time.monotonic()
        if found is None or bytes(found) != blob:
            what = "is gone" if found is None else "came back with other bytes"
            return problem("tier", store.name, f"what was written {what}")
        said = f"written in {_ms(written - began)}, read in {_ms(read - written)} (1 MiB, once)"
        return ok("tier", store.name, said)
    store.ask(lambda: backend.contains(key))
    return ok("tier", store.name, f"answers in {_ms(time.monotonic() - began)}; it is never written (`write: never`)")


def _directory(choice: TierChoice, path: Path) -> Iterator[Finding]:
    there = path
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if not os.path.exists(there):  # a link that leads nowhere: trying the tier says so
        return
    kind = file_system(there)
    if kind in ("tmpfs", "ramfs"):
        yield note("tier", choice.name, f"{there} is in memory ({kind}): it goes with the machine's power")
    elif kind == "overlay":
        yield note(
            "tier", choice.name, f"{there} is a container's own layer: it goes with the container; mount a volume"
        )
    elif kind in _FAR:
        yield note(
            "tier", choice.name, f"{there} is on another machine ({kind}): `kvloom plan` measures whether it pays"
        )
    free = shutil.disk_usage(there).free
    if choice.capacity is None:
        yield note("tier", choice.name, f"no `capacity`: it grows until {there} is full; {output.size(free)} are free")
    elif choice.capacity > free + _used(path):
        said = f"capacity {output.size(choice.capacity)}, and {output.size(free)} are free on {there}: lower it"
        yield problem("tier", choice.name, said)
    yield from _writable(choice, there)


def _used(path: Path) -> int:
    """Bytes that the tier's directory has already; they count as room."""
    if not os.path.isdir(path):
        return 0
    total = 0
    for root, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except OSError:
                continue
    return total


def _writable(choice: TierChoice, place: Path) -> Iterator[Finding]:
    """Check that files can be made there, and written past the page cache if the tier wants that."""
    assert choice.backend is not None
    flag: Any = getattr(os, "O_DIRECT", None)
    wanted = choice.backend.type == _DIRECT_TYPE and getattr(choice.backend.config, "direct", "") != "never"
    if wanted and flag is None:
        yield note("tier", choice.name, "no O_DIRECT on this system: reads and writes go through the page cache")
        return
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".kvloom-doctor") as file:
            if wanted:
                os.close(os.open(file.name, os.O_RDWR | flag))
    except PermissionError as error:
        text = f"{place}: {error.strerror}; choose another `path`, or change its owner"
        yield problem("tier", choice.name, text)
    except OSError as error:
        if wanted:
            text = f"no O_DIRECT on {place} ({error.strerror}): it goes through the page cache"
            yield note("tier", choice.name, text)
    else:
        if wanted:
            kind = file_system(place) or "unknown file system"
            yield ok("tier", choice.name, f"O_DIRECT works on {place} ({kind})")


def file_system(path: Path) -> str:
    """The type of what is mounted there; empty if that cannot be told."""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    real, best, kind = os.path.realpath(path), "", ""
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        mount = fields[1].replace("\\040", " ")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fields[2]
    return kind


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
