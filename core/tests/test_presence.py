"""What a tier answers from its ledger: what this engine can use, and what need not be written again."""

from __future__ import annotations

from typing import Any, cast

import pytest
from core_support import CHUNK, tokens_of

from kvloom import chain
from kvloom.builtin.dict_backend import DictBackend
from kvloom.runtime import SystemRuntime
from kvloom.tiers.calls import Calls
from kvloom.tiers.ledger import Fidelity, Ledger
from kvloom.tiers.presence import Presence
from kvloom.tiers.visit import Visit
from kvloom.types import ChunkKey

KEYS: dict[Fidelity | None, ChunkKey] = {
    fidelity: segment.key
    for fidelity, segment in zip(
        (None, Fidelity.EXACT, Fidelity.LOSSY, Fidelity.UNKNOWN, Fidelity.UNREADABLE, Fidelity.LATER),
        chain(tokens_of(6 * CHUNK), chunk_tokens=CHUNK, fingerprint="f" * 32),
        strict=True,
    )
}


class Serving:
    """Calls of a tier that is not to be asked anything."""

    def serves(self, visit: Visit) -> bool:
        return True


def presence(*, lossless: bool, exact_only: bool) -> Presence:
    """Over a ledger that knows one blob of each kind, and is complete."""
    ledger = Ledger(SystemRuntime())
    ledger.complete = True
    for fidelity, key in KEYS.items():
        if fidelity is not None:
            ledger.note(key, fidelity, nbytes=4096)
    return Presence(
        DictBackend(DictBackend.Config()), ledger, cast(Calls, Serving()), lossless=lossless, exact_only=exact_only,
        expired=lambda header: False, ttl=False,
    )  # fmt: skip


def which(answers: list[bool]) -> set[Fidelity | None]:
    return {fidelity for fidelity, yes in zip(KEYS, answers, strict=True) if yes}


@pytest.mark.parametrize("lossless", [True, False])
@pytest.mark.parametrize("exact_only", [True, False])
def test_what_can_be_used(lossless: bool, exact_only: bool) -> None:
    visit = cast(Any, None)
    found = which(presence(lossless=lossless, exact_only=exact_only).find(list(KEYS.values()), visit))
    assert found == {Fidelity.EXACT, Fidelity.UNKNOWN} | (set() if exact_only else {Fidelity.LOSSY})


def test_what_need_not_be_written() -> None:
    """A lossless tier improves on what is lossy, or not known; nobody writes over what a later release wrote."""

    def enough(*, lossless: bool, exact_only: bool) -> set[Fidelity | None]:
        return which(presence(lossless=lossless, exact_only=exact_only).known_enough(list(KEYS.values())))

    for exact_only in (True, False):
        assert enough(lossless=True, exact_only=exact_only) == {Fidelity.EXACT, Fidelity.LATER}
    some = {Fidelity.EXACT, Fidelity.UNKNOWN, Fidelity.LATER}
    assert enough(lossless=False, exact_only=True) == some
    assert enough(lossless=False, exact_only=False) == some | {Fidelity.LOSSY}
