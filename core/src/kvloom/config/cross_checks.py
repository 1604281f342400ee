"""Conflicts between settings that are valid by themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from kvloom.config.blocks import MemoryBlock, StoredBlock
from kvloom.config.validation_errors import Problem

Tiers = Sequence[MemoryBlock | StoredBlock | None]


def cross_checks(tiers: Tiers, *, wrong: Mapping[int, Collection[str]] | None = None) -> list[Problem]:
    """All conflicts between the tiers and inside each, by the path below `tiers`.

    None: a tier that could not be read. wrong: invalid settings, by the tier's index.
    """
    if not tiers:
        return [((), "at least one tier is needed, such as [memory]")]
    found: list[Problem] = []
    names: dict[str, int] = {}
    for index, tier in enumerate(tiers):
        if tier is None:
            continue
        unknown = (wrong or {}).get(index, ())
        if index and isinstance(tier, MemoryBlock):
            why = "there is one already" if isinstance(tiers[0], MemoryBlock) else "it must come first"
            found.append(((index, "type"), f"a memory tier cannot be here: {why}"))
        elif "name" not in unknown:
            other = names.setdefault(tier.name, index)
            if other != index:
                found.append(((index, "name"), f"tiers.{other} is called {tier.name!r} too; set another `name`"))
        in_memory = tiers[0] is None or isinstance(tiers[0], MemoryBlock)
        found += [((index, key), text) for key, text in _bounds(tier, unknown, in_memory=in_memory)]
    return found


def _bounds(tier: MemoryBlock | StoredBlock, unknown: Collection[str], *, in_memory: bool) -> Iterator[tuple[str, str]]:
    """Conflicts among a tier's own settings, by the key at fault."""
    if isinstance(tier, StoredBlock) and tier.write == "never":
        for key, value in (("capacity", tier.capacity), ("quota", tier.quota)):
            if value is not None:
                yield key, "a tier with `write: never` is only read; those who fill it set its bounds; remove it"
    elif "capacity" not in unknown:
        yield from _quotas(tier)
    if isinstance(tier, StoredBlock):
        if tier.write == "on_evict" and not in_memory:
            yield "write", "'on_evict' writes what the memory tier evicts, but there is none; put `memory` first"
        if tier.policy == "tiny_lfu" and tier.capacity is None and "capacity" not in unknown:
            yield "policy", "'tiny_lfu' decides what a full tier takes in; set `capacity`, or remove it"


def _quotas(tier: MemoryBlock | StoredBlock) -> Iterator[tuple[str, str]]:
    if tier.quota and tier.capacity is None:
        yield ("quota", "a quota is a part of the tier's capacity, which is not set; set `capacity`, or remove it")
    elif tier.capacity is not None:
        for salt, nbytes in (tier.quota or {}).items():
            if nbytes > tier.capacity:
                size, most = nbytes.human_readable(), tier.capacity.human_readable()
                yield "quota", f"{size} for {salt!r} is more than the tier's capacity ({most}); lower it"
