"""Support for the ledger's tests: a clock, keys of chains, and the calls with which a tier writes a blob."""

from __future__ import annotations

from hashlib import sha256

from core_support import PromptLedger as Ledger

from kvloom import ChunkKey, Entry
from kvloom.runtime import SystemRuntime
from kvloom.tiers.index.ledger import Fidelity

START = 1_000_000.0
EXACT = Fidelity.EXACT


class Clock(SystemRuntime):
    """A wall clock that stands still until it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.time = START

    def wall(self) -> float:  # type: ignore[override]
        return self.time


def key(name: object, *, depth: int = 0, tag: str = "-") -> ChunkKey:
    return ChunkKey(f"{'f' * 32}/{tag}", depth, sha256(f"{tag}/{name}".encode()).digest())


def chain_of(name: str, count: int, *, tag: str = "-") -> list[ChunkKey]:
    return [key(f"{name}{depth}", depth=depth, tag=tag) for depth in range(count)]


def write(ledger: Ledger, one: ChunkKey, nbytes: int = 1) -> list[ChunkKey]:
    """Write a blob like a tier; return the evicted keys."""
    ledger.expect(one)
    victims = ledger.admit(one, nbytes)
    assert victims is not None
    ledger.note(one, EXACT, nbytes=nbytes)
    return [victim.key for victim in victims]


def entry(one: ChunkKey, modified: float, *, nbytes: int = 1, used: float = 0.0) -> Entry:
    return Entry(str(one), nbytes, modified, used)


def held(ledger: Ledger) -> set[ChunkKey]:
    return set(ledger.names())


def order_of_going(ledger: Ledger) -> list[ChunkKey]:
    gone: list[ChunkKey] = []
    while victims := ledger.release(1):
        gone += [victim.key for victim in victims]
    return gone
