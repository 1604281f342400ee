"""The streams of CUDA devices on which a thread's work is queued, carried to the threads that go on with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class CurrentStreams:
    """The current device, and the current streams, of the thread that makes this. Initialises nothing.

    Every thread has its own, by default those of device 0. Work that a thread goes on with for another would otherwise
    not come after what the other has queued, and would take memory on a device that is not the other's.
    """

    __slots__ = ("_streams",)

    def __init__(self) -> None:
        torch = sys.modules.get("torch")
        self._streams: tuple[Any, ...] = ()
        if torch is not None and torch.cuda.is_initialized():
            here = torch.cuda.current_device()
            others = (device for device in range(torch.cuda.device_count()) if device != here)
            chosen = [torch.cuda.current_stream(device) for device in others]
            # To enter one makes a context on its device: where nothing was chosen, the default is in force anyway.
            chosen = [stream for stream in chosen if stream != torch.cuda.default_stream(stream.device)]
            self._streams = (*chosen, torch.cuda.current_stream(here))  # the last one's device stays the current one

    def __bool__(self) -> bool:
        return bool(self._streams)

    @contextmanager
    def current(self) -> Iterator[None]:
        """They are the calling thread's meanwhile."""
        if not self._streams:
            yield
            return
        import torch

        with ExitStack() as entered:
            for stream in self._streams:
                entered.enter_context(torch.cuda.stream(stream))
            yield
