"""Import kvloom's connectors where there is no pydantic or pluggy, as on a machine with a GPU and little else.

Importing this puts a stand-in in the place of each of the two that is missing. Settings are then taken as they are,
unchecked, and no engine can be opened.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

MISSING = [name for name in ("pydantic", "pluggy", "yaml", "xxhash") if importlib.util.find_spec(name) is None]
"""Packages that an engine needs and that are not installed."""


class _Settings:
    """In the place of `pydantic.BaseModel`."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def _default_of(default: Any = None, *, default_factory: Callable[[], Any] | None = None, **_bounds: Any) -> Any:
    return default if default_factory is None else default_factory()


class _Marker:
    """In the place of `pluggy.HookimplMarker` and `HookspecMarker`, without options."""

    def __init__(self, project: str) -> None: ...

    def __call__(self, function: Any) -> Any:
        return function


_STAND_INS: dict[str, dict[str, Any]] = {
    "pydantic": {
        "BaseModel": _Settings,
        "BeforeValidator": lambda check: check,
        "ByteSize": int,
        "ConfigDict": dict,
        "Field": _default_of,
    },
    "pluggy": {"HookimplMarker": _Marker, "HookspecMarker": _Marker},
}

for _name in _STAND_INS.keys() & MISSING:
    sys.modules[_name] = ModuleType(_name)
    vars(sys.modules[_name]).update(_STAND_INS[_name])
