"""KVStoreBuffer: tensors by name, on a storage backend."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from kvloom import BackendError, CorruptBlobError, StorageBackend, UnreadableBlobError, uninterrupted
from kvloom_connector_vllm.buffers import blobs
from kvloom_connector_vllm.buffers.base import BufferOnBackend, vllm_base
from kvloom_connector_vllm.buffers.room import Until


class KVStoreBuffer(BufferOnBackend, vllm_base("KVStoreBufferBase")):  # type: ignore[misc]
    """One tensor under each key, in any process that has the buffer open. The arguments are those of its base."""

    _part = "value"

    def __init__(
        self, backend: StorageBackend | Mapping[str, Any], *, capacity: int | str, timeout: float | str = 30.0,
        name: str = "kv-store", abandoned: float | str = 600.0,
    ) -> None:  # fmt: skip
        super().__init__(backend, capacity=capacity, timeout=timeout, name=name, abandoned=abandoned)

    def put(self, key: str, value: torch.Tensor | None) -> None:
        """Store `value` under `key`, replacing an older one; None deletes it. After return the caller may reuse the
        tensor.

        Waits until there is room. Raises DeadlineExceeded if there was none in time, ValueError if there can never be,
        BackendError if the store fails.
        """
        place = self._place(key)
        self._check_open()
        if value is None:
            uninterrupted(partial(self._delete, place))
            return
        blobs.check("value", value)
        until = Until(self.timeout)
        blob = blobs.seal(place, [value], params={"key": key})
        uninterrupted(partial(self._put, place, blob, until=until), cancel=until.end)

    def get(self, key: str) -> torch.Tensor | None:
        """The tensor under `key`, verified, in new host memory; None if there is none.

        Damaged values (counted as `corrupt`), values of a later version (`unreadable`) and errors of the store
        (`failed`) count as missing. Never waits for a value.
        """
        place = self._place(key)
        self._check_open()
        return uninterrupted(partial(self._get, key, place), leave=True)

    def _get(self, key: str, place: str) -> torch.Tensor | None:
        try:
            blob = self._content(place)
            if blob is None:
                return None
            (tensor,), params = blobs.unseal(blob, key=place)
            if params.get("key") != key:
                raise CorruptBlobError("the blob of another key")
        except CorruptBlobError:
            self._count("corrupt")
        except UnreadableBlobError:
            self._count("unreadable")
        except Exception:
            self._count("failed")
        else:
            return tensor
        return None

    def _delete(self, place: str) -> None:
        try:
            self._backend.delete(place)
        except Exception as error:
            self._count("failed")
            raise BackendError(f"could not delete: {error}") from error
        self._count("deleted")
        self._notify()

    def _place(self, key: str) -> str:
        if not isinstance(key, str):
            raise TypeError(f"key: expected a str, got {type(key).__name__}")
        return f"{self._name}/value/{hashlib.sha256(key.encode(errors='surrogatepass')).hexdigest()}"
