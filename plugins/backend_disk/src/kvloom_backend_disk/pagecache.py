"""What the kernel's page cache holds."""

from __future__ import annotations

import os


def is_cached(fd: int, offset: int, num_bytes: int) -> bool:
    """Whether the page cache seems to hold this part of the file: it holds a page at each quarter of it.

    Looking at an uncached page makes the kernel fetch that one page. So a part that is read a second time before these
    pages are dropped counts as cached, is read through the page cache and stays in it from then on.
    """
    nowait = getattr(os, "RWF_NOWAIT", 0)
    if not nowait:
        return True
    page = bytearray(1)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # else the look starts reading ahead
    try:
        return all(os.preadv(fd, [page], offset + num_bytes * part // 4, nowait) for part in (1, 3))
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system that cannot answer without waiting
    finally:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
