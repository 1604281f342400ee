"""kvloom token database `radix`: segments that end where known sequences branch."""

from __future__ import annotations

from collections.abc import Mapping

from kvloom import hookimpl


@hookimpl
def kvloom_token_databases() -> Mapping[str, str]:
    return {"radix": "kvloom_tokens_radix.database:RadixTokenDatabase"}
