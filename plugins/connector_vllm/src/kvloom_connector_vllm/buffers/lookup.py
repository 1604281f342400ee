"""KVLookupBuffer: entries found by their tokens, each taken only once, by any thread or process.

An entry is one blob. To take it, a reader creates a claim with the entry's id, which only one reader can; it then reads
the entry, deletes it, and deletes the claim last. Ids are never reused, so a claim made from an old listing finds
nothing. A reader that dies leaves its claim: it may have passed the entry on, so no other reader gets it. Once the
claim is `abandoned` seconds old, entry and claim are deleted, in that order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from kvloom import (
    BackendError,
    CorruptBlobError,
    IncompleteListingError,
    StorageBackend,
    UnreadableBlobError,
    envelope,
    get_at_most,
    uninterrupted,
)
from kvloom_connector_vllm.buffers import blobs
from kvloom_connector_vllm.buffers.base import BufferOnBackend, vllm_base
from kvloom_connector_vllm.buffers.room import Until, age_seconds, new_id

_PAGE_BYTES = 4096
_NOTHING = 5
_CLAIM_BYTES = 256
_MOST_PREFIX_BYTES = 256 << 20
"""Longest tokens and mask of an entry."""


class Prefix(NamedTuple):
    """The tokens of an entry or of a question, and which of them its KV is for. Both 1-D, of one length."""

    tokens: torch.Tensor
    roi: torch.Tensor

    def common(self, other: Prefix) -> int:
        """The number of tokens of KV in the shorter prefix, if it is the beginning of the longer one; else 0.

        KV depends on where its token stands and on all tokens before it, so both must agree in that too, also in
        tokens that are masked out.
        """
        mine, theirs = self.roi.nonzero().view(-1), other.roi.nonzero().view(-1)
        count = min(len(mine), len(theirs))
        if not count or not torch.equal(mine[:count], theirs[:count]):
            return 0
        end = int(mine[count - 1]) + 1
        return count if torch.equal(self.tokens[:end].long(), other.tokens[:end].long()) else 0

    @property
    def covered(self) -> int:
        """The number of tokens with KV."""
        return int(self.roi.count_nonzero())


class KVLookupBuffer(BufferOnBackend, vllm_base("KVLookupBufferBase")):  # type: ignore[misc]
    """Entries of KV that are put in once and taken out once. The arguments are those of its base."""

    _part = "entry"

    def __init__(
        self, backend: StorageBackend | Mapping[str, Any], *, capacity: int | str, timeout: float | str = 30.0,
        name: str = "kv-lookup", abandoned: float | str = 600.0,
    ) -> None:  # fmt: skip
        super().__init__(backend, capacity=capacity, timeout=timeout, name=name, abandoned=abandoned)
        self._known: dict[str, Prefix | None] = {}
        self._next_upkeep = 0.0

    def insert(
        self, input_tokens: torch.Tensor, roi: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:  # fmt: skip
        """Put an entry in. The tensors are the caller's again on return.

        input_tokens: 1-D, integers. roi: 1-D mask of the same length, not False of the tokens that the KV is for.
        key, value, hidden: of any shape and device, or None.

        Waits until there is room. Raises DeadlineExceeded if there was none in time, ValueError if there can never be,
        BackendError if the store fails; then nothing was put in.
        """
        prefix = _prefix(input_tokens, roi)
        if not prefix.covered:
            raise ValueError("roi: selects no token, so this entry could never be found")
        for name, tensor in (*prefix._asdict().items(), ("key", key), ("value", value), ("hidden", hidden)):
            if tensor is not None:
                blobs.check(name, tensor)
        nbytes = sum(part.nbytes for part in prefix)
        if nbytes > _MOST_PREFIX_BYTES:
            raise ValueError(f"input_tokens: {nbytes} bytes with roi; an entry has {_MOST_PREFIX_BYTES} at most")
        until = Until(self.timeout)
        uninterrupted(partial(self._insert, [*prefix, key, value, hidden], until), cancel=until.end)

    def _insert(self, tensors: list[torch.Tensor | None], until: Until) -> None:
        place = f"{self._name}/entry/{new_id()}"
        blob = blobs.seal(place, tensors)
        self._upkeep()
        try:
            self._put(place, blob, until=until)
        except BackendError:
            with contextlib.suppress(Exception):  # a store may fail and have it all the same
                self._backend.delete(place)
            raise

    def drop_select(self, input_tokens: torch.Tensor | None, roi: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Take an entry out: `[input_tokens, roi, key, value, hidden]` as it was put in, in host memory.

        input_tokens, roi: as for `insert`; roi may be None for all tokens. An entry fits if its KV is that of a prefix
        of the wanted tokens, or the reverse: the same tokens at the same places up to the last one that both have. The
        entry with the most common tokens is taken; among several the one with the fewest others, then the oldest. None
        and None: the oldest entry.

        Waits for one; returns five times None if there is none in time. A signal handler that raises may lose the entry
        that is being taken. No other caller gets the same entry. Damaged entries (counted as `corrupt`) are deleted;
        those of later versions (`unreadable`) stay. Errors of the store are counted as `failed`, and retried until the
        time is over.
        """
        if input_tokens is None and roi is not None:
            raise ValueError("input_tokens: None takes any entry; pass roi=None too")
        query = None if input_tokens is None else _prefix(input_tokens, roi)
        until = Until(self.timeout)
        return uninterrupted(partial(self._drop_select, query, until), cancel=until.end)

    def _drop_select(self, query: Prefix | None, until: Until) -> list[torch.Tensor | None]:
        pause: float | None = 0.0
        while pause is not None:
            self._check_open()
            self._upkeep()
            for id in self._candidates(query):
                taken = self._take(id)
                if taken is not None:
                    self._count("taken")
                    self._notify()
                    return taken
            pause = self._wait(until, pause)
        self._count("missed")
        return [None] * _NOTHING

    # -- finding -------------------------------------------------------------------------------------------------------

    def _candidates(self, query: Prefix | None) -> list[str]:
        """The ids of unclaimed entries that fit, best first."""
        try:
            claimed = set(self._ids("claim"))
            ids = sorted(self._ids("entry"))
        except Exception:
            self._count("failed")
            return []
        before = self._known
        # Another thread may put another in its place at any time.
        known = self._known = {id: before[id] for id in ids if id in before}
        free = [id for id in ids if id not in claimed]
        if query is None:
            return [id for id in free if id not in known or known[id] is not None]
        found = []
        for id in free:
            prefix = known[id] if id in known else self._prefix_of(id)
            common = query.common(prefix) if prefix is not None else 0
            if prefix is not None and common:
                found.append((-common, prefix.covered, id))
        return [id for _, _, id in sorted(found)]

    def _ids(self, part: str) -> list[str]:
        """The entries that can be listed: what cannot be read keeps nobody from the rest."""
        above = f"{self._name}/{part}/"
        found: list[str] = []
        try:
            found.extend(entry.key.removeprefix(above) for entry in self._backend.scan(above))
        except IncompleteListingError:
            self._count("failed")
        return found

    def _prefix_of(self, id: str) -> Prefix | None:
        """The prefix of an entry, read from the beginning of its blob; None if it cannot be read."""
        try:
            prefix = self._read_prefix(f"{self._name}/entry/{id}")
        except CorruptBlobError:
            self._discard(id)
            return None
        except UnreadableBlobError:
            self._count("unreadable")
            self._known[id] = None
            return None
        except Exception:
            self._count("failed")
            return None
        if prefix is not None:
            self._known[id] = prefix
        return prefix

    def _read_prefix(self, place: str) -> Prefix | None:
        page = self._range(place, 0, _PAGE_BYTES)
        head = page and self._range(place, 0, envelope.header_bytes(page))
        header = head and envelope.parse(head, key=place)
        if not head or not header:
            return None
        nbytes = sum(header.lengths[:2])
        if nbytes > min(self.capacity, _MOST_PREFIX_BYTES):
            raise CorruptBlobError(f"tokens of {nbytes} bytes in a buffer of {self.capacity}")
        if nbytes and self._range(place, len(head) + nbytes - 1, 1) is None:  # before memory is taken for all of it
            return None
        data = self._range(place, 0, len(head) + nbytes)
        if data is None:
            return None
        envelope.Verifier(data, key=place).filled(len(data))
        tokens, roi = blobs.tensors(header, data[len(head) :], 2)
        try:
            if roi is None:
                raise ValueError("no roi")
            prefix = _prefix(tokens, roi)
            prefix.common(prefix)
        except (ValueError, RuntimeError) as error:  # the latter of a dtype without comparisons
            raise UnreadableBlobError(f"not an entry: {error}") from error
        return prefix

    def _range(self, place: str, offset: int, nbytes: int) -> memoryview | None:
        """Part of a blob, None if the blob is gone. Raises CorruptBlobError if it is shorter."""
        data = memoryview(bytearray(nbytes))
        if self._backend.get_range(place, offset, data):
            return data
        if self._backend.contains(place):
            raise CorruptBlobError("shorter than it says")
        return None

    # -- taking --------------------------------------------------------------------------------------------------------

    def _take(self, id: str) -> list[torch.Tensor | None] | None:
        place = f"{self._name}/entry/{id}"
        if not self._claim(id):
            return None
        try:
            blob = self._content(place)
            taken = None if blob is None else blobs.unseal(blob, key=place)[0]
            if taken is not None and len(taken) != _NOTHING:
                raise UnreadableBlobError(f"not an entry: {len(taken)} tensors")
        except CorruptBlobError:
            self._count("corrupt")
            self._delete(id)
            return None
        except UnreadableBlobError:
            self._count("unreadable")
            self._known[id] = None
            self._release(id)
            return None
        except Exception:
            self._count("failed")
            self._release(id)  # it was not returned, so another caller may have it
            return None
        if taken is None:
            self._release(id)
        else:
            self._delete(id)
        return taken

    def _discard(self, id: str) -> None:
        if self._claim(id):
            self._count("corrupt")
            self._delete(id)

    def _claim(self, id: str) -> bool:
        try:
            return self._backend.create(f"{self._name}/claim/{id}", [new_id().encode()])
        except Exception:
            self._count("failed")
            return False

    def _delete(self, id: str) -> None:
        """Delete an entry whose claim is ours. If that fails the claim stays, so that no other reader gets it."""
        try:
            self._backend.delete(f"{self._name}/entry/{id}")
        except Exception:
            self._count("failed")
        else:
            self._release(id)

    def _release(self, id: str) -> None:
        with contextlib.suppress(Exception):  # else it goes when it is old
            self._backend.delete(f"{self._name}/claim/{id}")

    # -- what the dead left --------------------------------------------------------------------------------------------

    def _upkeep(self) -> None:
        """Delete entries that were claimed and never taken to the end, long ago (counted as `abandoned`)."""
        now = time.monotonic()
        if now < self._next_upkeep:
            return
        self._next_upkeep = now + self._abandoned / 4
        with contextlib.suppress(Exception):
            for id in self._ids("claim"):
                with contextlib.suppress(Exception):  # one that cannot be read keeps no other
                    self._end_if_abandoned(id)

    def _end_if_abandoned(self, id: str) -> None:
        made: bytes | bytearray | None
        try:
            made = get_at_most(self._backend, f"{self._name}/claim/{id}", _CLAIM_BYTES)
        except CorruptBlobError:  # nobody's
            made = b""
        if made is not None and age_seconds(made.decode(errors="replace")) > self._abandoned:
            if self._backend.contains(f"{self._name}/entry/{id}"):
                self._count("abandoned")
            self._delete(id)


def _prefix(tokens: object, roi: object) -> Prefix:
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 1 or tokens.dtype.is_floating_point:
        raise ValueError("input_tokens: expected a 1-D integer tensor")
    roi = torch.ones(len(tokens), dtype=torch.bool) if roi is None else roi
    if not isinstance(roi, torch.Tensor) or roi.shape != tokens.shape:
        raise ValueError(f"roi: expected a 1-D mask of {len(tokens)} entries, like input_tokens")
    return Prefix(tokens.detach().cpu(), roi.detach().cpu())
