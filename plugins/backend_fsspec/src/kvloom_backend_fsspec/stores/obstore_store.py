"""Objects by obstore: S3, Google Cloud Storage, Azure and local directories."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from kvloom import BackendError, CorruptBlobError, Sink, UnreadableBlobError
from kvloom_backend_fsspec.config import Config
from kvloom_backend_fsspec.errors import explained, failed_for_one, is_beyond_the_end, says_no_bucket, was_not_sent
from kvloom_backend_fsspec.stores.base import Listed, Memory
from kvloom_backend_fsspec.stores.native import native
from kvloom_backend_fsspec.stores.obstore_client import client_of

PART_BYTES = 8 << 20
"""Maximum size of one request, so that its timeout is meaningful for a blob of any size."""
_PIECE_BYTES = 256 << 10
_PAGE = 1000
_MOST_PAGES = 1 << 16
"""Longest listing, in pages: a server may repeat one for ever."""
_PAGE_TIMEOUTS = 10
"""Multiple of `timeout` that a page may take. A server that sends empty ones is asked on and on within it."""
_PARTS_AT_ONCE = 4
_MOST_WHOLE_BYTES = 1 << 30
"""Maximum size of an object that is read whole for a part of it."""
_ARCHIVED = ("InvalidObjectState", "BlobArchived")
"""The code of S3 and that of Azure for an object that a rule of the bucket has moved to where it cannot be read."""
_SERVER_FAILED = "500 Internal Server Error"
T = TypeVar("T")


class ObstoreStore:
    """One client, for all threads of the process that made it."""

    def __init__(self, config: Config) -> None:
        self._native = native()
        self._errors = self._native.exceptions
        self._place, self._timeout = config.place, config.timeout
        self._parts = min(_PARTS_AT_ONCE, config.threads)
        self._large = False
        self._local = self._place.scheme == "file"
        try:
            self._client = client_of(self._native, config)
            self._alone = client_of(self._native, config, bulk_delete=False)
        except self._errors.UnknownConfigurationKeyError as error:
            raise ValueError(
                f"options: {_first_line(error)}; the settings are obstore's of {self._place.scheme}://"
            ) from None
        except self._errors.BaseError as error:
            raise ValueError(f"options: {_first_line(error)}") from None

    def put(self, name: str, data: bytes) -> None:
        whole = len(data) <= PART_BYTES or self._local
        self._ask(
            lambda: self._native.put(
                self._client, name, data, use_multipart=not whole, chunk_size=PART_BYTES, max_concurrency=self._parts
            )
        )

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._ask(lambda: self._native.put(self._client, name, data, mode="create", use_multipart=False))
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
            return False
        except self._errors.NotSupportedError as error:
            raise NotImplementedError(_first_line(error)) from None
        return True

    def get(self, name: str) -> bytes | None:
        memory = Memory()
        return memory.data if self.read(name, memory) else None

    def read(self, name: str, sink: Sink) -> bool:
        # The blobs of a tier are mostly of one size. Only large ones are asked for by range: Ceph answers 500 to a
        # range of what is replaced meanwhile (a fifth of the reads beside two writers), and hardly ever to the whole.
        try:
            first = self._begin(name, (0, PART_BYTES) if self._large else None)
        except _BeyondTheEnd:
            raise CorruptBlobError(f"an empty object: {name}") from None
        if first is None:
            return False
        size = first.meta["size"]
        if not size:
            raise CorruptBlobError(f"an empty object: {name}")
        self._large = size > PART_BYTES
        view = sink.reserve(size)[:size]
        self._receive(first, view[:PART_BYTES], sink.filled)
        if size > PART_BYTES:
            self._read_rest(name, first.meta["e_tag"], view, sink)
        return True

    def _read_rest(self, name: str, tag: str | None, view: memoryview, sink: Sink) -> None:
        """The parts behind the first one, several at once; of the same version, or it raises."""
        starts = range(PART_BYTES, len(view), PART_BYTES)
        stopped = threading.Event()

        def go_on(_: int) -> None:
            if stopped.is_set():
                raise BackendError("another part failed")

        def read_part(start: int) -> int:
            part = view[start : start + PART_BYTES]
            found = self._begin(name, (start, start + len(part)), tag)
            if found is None:
                raise BackendError(f"{name} was deleted while it was read")
            self._receive(found, part, go_on)
            return start + len(part)

        pool = ThreadPoolExecutor(self._parts, thread_name_prefix="kvloom-parts")
        parts: list[Future[int]] = []
        try:
            parts = [pool.submit(read_part, start) for start in starts]
            for part in parts:
                sink.filled(part.result())
        finally:
            # The memory belongs to the sink: nothing may write to it once this has returned.
            stopped.set()
            for part in parts:
                part.cancel()
            wait(parts)
            pool.shutdown()

    def read_range(self, name: str, offset: int, into: memoryview) -> bool:
        try:
            found = self._begin(name, (offset, offset + len(into)))
        except _BeyondTheEnd:
            return False
        except BackendError as error:
            if _SERVER_FAILED not in str(error):
                raise
            memory = Memory(_MOST_WHOLE_BYTES)
            if not self.read(name, memory) or len(memory.data) < offset + len(into):  # see `read`
                return False
            into[:] = memoryview(memory.data)[offset : offset + len(into)]
            return True
        if found is None or found.meta["size"] < offset + len(into):
            return False
        self._receive(found, into, lambda _: None)
        return True

    def _begin(self, name: str, part: tuple[int, int] | None, tag: str | None = None) -> Any:
        """The answer to a request, for a part if one is given, before its bytes; None if there is no object."""
        options: dict[str, Any] = {"range": part} if part is not None else {}
        if tag is not None:
            options["if_match"] = tag
        try:
            return self._ask(lambda: self._native.get(self._client, name, options=options))
        except FileNotFoundError:
            return None
        except self._errors.PreconditionError:
            raise BackendError(f"{name} was replaced while it was read") from None
        except BackendError as error:
            if any(word in str(error) for word in _ARCHIVED):
                raise UnreadableBlobError(f"the store has archived {name}") from error
            raise

    def _receive(self, answer: Any, into: memoryview, filled: Callable[[int], None]) -> None:
        """Fill `into` with the first bytes of an answer; what comes behind them is left."""
        at = 0
        with self._explaining():
            pieces = answer.stream(min_chunk_size=_PIECE_BYTES)
        while at < len(into):
            with self._explaining():
                piece = next(pieces, None)
            if piece is None:
                raise BackendError(f"the store sent {at} bytes of {len(into)}")
            data = memoryview(piece)[: len(into) - at]
            into[at : at + len(data)] = data
            at += len(data)
            filled(at)

    def size(self, name: str) -> int | None:
        try:
            return int(self._ask(lambda: self._native.head(self._client, name))["size"])
        except FileNotFoundError:
            return None

    def delete(self, names: Sequence[str]) -> None:
        if len(names) > 1:
            try:
                self._delete_batch(list(names))
                return
            except FileNotFoundError:
                pass  # of one; of the others nothing is known
            except BackendError as error:
                if not failed_for_one(str(error)):
                    raise
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._ask(partial(self._native.delete, self._alone, name))

    def _delete_batch(self, names: list[str]) -> None:
        """By one request. obstore repeats no POST that was lost on its way, since few are idempotent; this one is."""
        try:
            self._ask(lambda: self._native.delete(self._client, names))
        except BackendError as error:
            if not was_not_sent(str(error)):
                raise
            self._ask(lambda: self._native.delete(self._client, names))

    def list(self, directory: str) -> Iterator[Listed]:
        began: str | None = None
        with self._explaining(), contextlib.closing(self._pages(directory)) as pages:
            for number, page in enumerate(pages):
                if number == _MOST_PAGES or page is None or page[0]["path"] == began:
                    raise BackendError(
                        f"the listing of {directory or 'the bucket'} does not end: it is at page {number}"
                    )
                began = page[0]["path"]
                for found in page:
                    yield Listed(found["path"], found["size"], found["last_modified"].timestamp(), found["e_tag"] or "")

    def _pages(self, directory: str) -> Generator[Any, None, None]:
        """The pages of a listing; None for one that does not come in time, which is cancelled.

        obstore can only be cancelled in an event loop. The caller's thread may have one that runs, and a thread of a
        pool would keep the process from ending.
        """
        asked: SimpleQueue[bool] = SimpleQueue()
        answers: SimpleQueue[Any] = SimpleQueue()

        def fetch() -> None:
            try:
                with asyncio.Runner() as runner:
                    pages = self._native.list(self._client, prefix=directory or None, chunk_size=_PAGE)
                    while asked.get():
                        answers.put(runner.run(_next_page(pages, _PAGE_TIMEOUTS * self._timeout)))
            except BaseException as error:
                answers.put(error)

        threading.Thread(target=fetch, name="kvloom-listing", daemon=True).start()
        try:
            while True:
                asked.put(True)
                page = answers.get()
                if isinstance(page, BaseException):
                    raise page
                if page is _LAST:
                    return
                yield page
        finally:
            asked.put(False)

    def close(self) -> None:
        """Connections go with the client."""

    def _ask(self, call: Callable[[], T]) -> T:
        with self._explaining():
            return call()

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn obstore's errors into those of `ObjectStore`; errors that callers distinguish pass unchanged."""
        try:
            yield
        except FileNotFoundError as error:
            if says_no_bucket(str(error)):
                raise BackendError(explained(error, self._place)) from None
            raise
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError, self._errors.NotSupportedError):
            raise
        except self._errors.BaseError as error:
            if is_beyond_the_end(str(error)):
                raise _BeyondTheEnd(_first_line(error)) from None
            raise BackendError(explained(error, self._place)) from None


class _BeyondTheEnd(BackendError):
    """A range that begins where there is nothing any more."""


_LAST = object()


async def _next_page(pages: Any, seconds: float) -> Any:
    """The next page, `_LAST` behind the last one, or None if it does not come in time."""
    try:
        async with asyncio.timeout(seconds):
            return await anext(pages, _LAST)
    except TimeoutError:
        return None
    except (ValueError, OverflowError) as error:  # a date that Python does not have
        raise BackendError(f"the store lists what there cannot be: {error}") from None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
