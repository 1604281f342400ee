"""Objects that are of no use in a forked child: threads are not there, and nobody releases the locks that were held."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """An object to be told, in a forked child, that it is in one."""

    def after_fork_in_child(self, pid: int) -> None:
        """Called in the child, where this was opened by process `pid`. Be harmless from now on; may come twice."""


_aware: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_pid = os.getpid()
_forked = False


def notify_after_fork(one: ForkAware) -> None:
    """Have `one.after_fork_in_child` called in every child that this process is forked into.

    That costs nothing afterwards, where comparing process ids would cost a system call each time.
    """
    _aware.add(one)


def was_forked() -> bool:
    """Return whether this process was forked after this module was imported."""
    return _forked


def _in_child() -> None:
    global _pid, _forked
    parent, _pid, _forked = _pid, os.getpid(), True
    for one in tuple(_aware):
        one.after_fork_in_child(parent)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
