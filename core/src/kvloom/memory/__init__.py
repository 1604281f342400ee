"""The pool: page-aligned memory of the host or of a device that is reserved, filled, sealed and handed out by lease."""

from kvloom.memory.pool import Block, Lease, Origin, Pool, Reservation, caller, pages_of

__all__ = ["Block", "Lease", "Origin", "Pool", "Reservation", "caller", "pages_of"]
