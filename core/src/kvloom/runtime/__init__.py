"""Clock, randomness, locks and threads of the system, and the worker threads that run calls with a deadline."""

from kvloom.runtime.system import Condition, Lock, Runtime, SystemRuntime, Thread, close_all
from kvloom.runtime.workers import Batch, Call, NoThreadError, Workers, lacks_resource

__all__ = [
    "Batch", "Call", "Condition", "Lock", "NoThreadError", "Runtime", "SystemRuntime", "Thread", "Workers",
    "close_all", "lacks_resource",
]  # fmt: skip
