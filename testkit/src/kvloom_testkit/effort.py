"""How much the kit does to meet a fault that shows only now and then."""

from __future__ import annotations

_TIMES, _PART = 5, 4
thorough = False
"""`--kvloom-thorough`, and `kvloom check --thorough`."""
brief = False
"""For what is known to be right: the kit's own tests."""


def rounds(usual: int) -> int:
    """How often something is tried that is tried `usual` times, if nobody has asked for more or less."""
    return usual * _TIMES if thorough else usual // _PART if brief else usual
