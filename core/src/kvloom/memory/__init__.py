"""The pool: page-aligned host or device memory that is reserved, filled, sealed and leased."""

from kvloom.memory.mapped import MappedLease, MappedMemory
from kvloom.memory.pool import Block, Lease, Origin, Pool, Reservation, caller, lease_all, pages_of

__all__ = [
    "Block", "Lease", "MappedLease", "MappedMemory", "Origin", "Pool", "Reservation", "caller", "lease_all", "pages_of",
]  # fmt: skip
