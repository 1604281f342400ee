"""The pool: page-aligned memory of the host or of a device that is reserved, filled, sealed and handed out by lease."""

from kvloom.memory.origin import Origin, caller
from kvloom.memory.pool import Block, Lease, Pool, Reservation, pages_of

__all__ = ["Block", "Lease", "Origin", "Pool", "Reservation", "caller", "pages_of"]
