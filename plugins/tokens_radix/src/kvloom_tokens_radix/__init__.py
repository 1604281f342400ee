"""kvloom token database `radix`: segments that end where known sequences branch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvloom import hookimpl

if TYPE_CHECKING:
    from kvloom import TokenDatabase


@hookimpl
def kvloom_token_databases() -> Iterable[type[TokenDatabase]]:
    from kvloom_tokens_radix.database import RadixTokenDatabase

    return [RadixTokenDatabase]
