"""Namespaces and tenants of a ledger: the tenant of each row, and the bytes and quota of each tenant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvloom.keys import salt_tag_of
from kvloom.tiers.index.columns import Columns
from kvloom.tiers.index.lru import Links, Ring


@dataclass(slots=True, eq=False)
class Tenant:
    """The rows under one salt tag, of any model."""

    tag: str
    quota: int | None
    ring: Ring | None
    """Its rows in order of use, if it has a quota."""
    bytes: int = 0
    namespaces: int = 0


@dataclass(slots=True, eq=False)
class Namespace:
    """A name, for as long as there are rows in it."""

    name: str
    tenant: Tenant
    rows: int = 0


class Quotas:
    """Numbers for namespaces, which come and go with their rows; nothing is kept of those that have none."""

    def __init__(self, rows: Columns, quota: Mapping[str, int] | None) -> None:
        self._rows = rows
        self._quota = dict(quota or {})
        self._links = Links(rows) if self._quota else None
        self._numbers: dict[str, int] = {}
        self.namespaces: list[Namespace] = []
        """By number, as the column `space` has it."""
        self._free: list[int] = []
        self._by_tag: dict[str, Tenant] = {}

    def quota_of(self, namespace: str) -> int | None:
        """Bytes; None if there is no limit."""
        if self._links is None:
            return None
        tag = salt_tag_of(namespace)
        return self._quota.get(tag, self._quota.get("*"))

    @property
    def limits(self) -> bool:
        """True if any tenant has a quota."""
        return self._links is not None

    def get(self, namespace: str) -> Tenant | None:
        """The tenant that a namespace belongs to, if it has any rows."""
        return self._by_tag.get(salt_tag_of(namespace))

    def limited(self) -> list[Tenant]:
        """Those that have a quota."""
        return [tenant for tenant in self._by_tag.values() if tenant.ring is not None]

    def tenant(self, row: int) -> Tenant:
        return self.namespaces[self._rows.space[row]].tenant

    def bytes(self) -> dict[str, int]:
        return {tag: tenant.bytes for tag, tenant in self._by_tag.items()}

    def enter(self, row: int, name: str) -> Tenant:
        """Put a row into the namespace `name`; return its tenant."""
        number = self._numbers.get(name)
        if number is None:
            number = self._open(name)
        self._rows.space[row] = number
        namespace = self.namespaces[number]
        namespace.rows += 1
        return namespace.tenant

    def renew(self, rows: Sequence[int]) -> None:
        """As `Ring.renew`, in the rings of the tenants, if there are any."""
        if self._links is None:
            return
        space = self._rows.space
        numbers = {space[row] for row in rows if row}
        rings = {number: self.namespaces[number].tenant.ring for number in numbers}
        for ring in dict.fromkeys(rings.values()):
            if ring is not None:
                ring.renew(rows if len(numbers) == 1 else [row for row in rows if row and rings[space[row]] is ring])

    def leave(self, row: int, nbytes: int) -> None:
        """Take a row of `nbytes` out of its namespace."""
        if self._links is not None:
            self._links.take_out(row)
        namespace = self.namespaces[self._rows.space[row]]
        namespace.tenant.bytes -= nbytes
        namespace.rows -= 1
        if not namespace.rows:
            self._close(namespace)

    def _open(self, name: str) -> int:
        tag = salt_tag_of(name)
        tenant = self._by_tag.get(tag)
        if tenant is None:
            quota = self.quota_of(name)
            ring = Ring(self._rows, self._links) if quota is not None and self._links is not None else None
            tenant = self._by_tag[tag] = Tenant(tag, quota, ring)
        tenant.namespaces += 1
        if self._free:
            number = self._free.pop()
            self.namespaces[number] = Namespace(name, tenant)
        else:
            number = len(self.namespaces)
            self.namespaces.append(Namespace(name, tenant))
        self._numbers[name] = number
        return number

    def _close(self, namespace: Namespace) -> None:
        number = self._numbers.pop(namespace.name)
        self._free.append(number)
        tenant = namespace.tenant
        tenant.namespaces -= 1
        if not tenant.namespaces:
            del self._by_tag[tenant.tag]
            if tenant.ring is not None:
                tenant.ring.close()
