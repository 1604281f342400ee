"""The pool: page-aligned host or device memory that is reserved, filled, sealed and leased."""

from kvloom.memory.mapped import MappedLease, MappedMemory, Mappings, intact, lease_mapped
from kvloom.memory.pool import Block, Lease, Origin, Pool, Reservation, caller, lease_all, pages_of

__all__ = [
    "Block", "Lease", "MappedLease", "MappedMemory", "Mappings", "Origin", "Pool", "Reservation", "caller", "intact",
    "lease_all", "lease_mapped", "pages_of",
]  # fmt: skip
