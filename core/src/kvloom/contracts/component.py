"""The base of every pluggable part: a word in YAML, a typed config, a constructor and `close`."""

from __future__ import annotations

import builtins
import re
from abc import ABC
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvloom.redaction import masked
from kvloom.types import KVSpec

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(-?[0-9]*\.?[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)


def _parse_duration(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"not a duration: {value!r}; write 250ms, 30s, 5m, 6h or 7d")
    return float(match[1]) * _UNITS[match[2].lower()]


Duration = Annotated[float, BeforeValidator(_parse_duration), Field(allow_inf_nan=False)]
"""Seconds; YAML may say `250ms`, `30s`, `5m`, `6h`, `7d`."""

_MOST_BYTES = 1 << 50
_MOST_SHOWN_BYTES = 1 << 70


class ByteSize(pydantic.ByteSize):
    """Bytes, at most 1PiB; YAML may say `20GiB`."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema  # here: bench/bare.py has no stand-in for it

        return core_schema.no_info_after_validator_function(
            _plausible, super().__get_pydantic_core_schema__(source, handler)
        )


def _plausible(value: ByteSize) -> ByteSize:
    if value > _MOST_BYTES:
        # A number of hundreds of digits is no float, which it would be shown by.
        shown = f", not {value.human_readable()}" if value < _MOST_SHOWN_BYTES else ""
        raise ValueError(f"should be at most 1PiB{shown}; check the unit")
    return value


class Config(BaseModel):
    """The base of every component's settings: unknown keys are errors, values are frozen, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, masked(value, name)


_Config = Config  # inside the class, the name is the attribute


class Component(ABC):
    """A pluggable part. Subclass one of the kinds, not this.

    A class is registered by returning it from the hook of its kind; the core makes the instances. They must not change
    the state of the process (logging, signals, warnings, random numbers, torch's settings), not even when they are
    closed.
    """

    type: ClassVar[str]
    """The word that users write in YAML."""
    Config: ClassVar[builtins.type[_Config]] = _Config
    extras: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Modules that instances import and that only an extra of the distribution installs, with the name of the extra. If
    one is not there, the configuration is refused before anything is opened, with how to install it."""

    def __init__(self, config: _Config, spec: KVSpec | None = None) -> None:
        self.config = config
        self.spec = spec

    def close(self) -> None:
        """Release everything. Idempotent. No other method is called afterwards."""
