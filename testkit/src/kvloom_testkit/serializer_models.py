"""The models that a serializer is tried with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvloom import KVSpec, MemoryFormat, Serializer
from kvloom_testkit.chunks import MODELS
from kvloom_testkit.remaking import once_more, spec_of

REAL_TOKENS = (256, 257)
"""Of chunks of real size."""


def for_every_model(serializer: Serializer) -> Iterator[tuple[KVSpec, Serializer]]:
    """The serializer made for one model after the other, as long as it takes KV like theirs."""
    for spec in (spec_of(serializer), *MODELS):
        try:
            one = once_more(serializer, spec=spec)
        except ValueError:  # ConfigError is one
            continue
        yield spec, one
        one.close()


def of_real_size(serializer: Serializer) -> Iterator[tuple[KVSpec, Serializer]]:
    """The serializer made for a model of some size, of which chunks take MiBs, if it takes KV like that."""
    if MemoryFormat.KV_BLOB in serializer.formats:
        spec = replace(spec_of(serializer), num_layers=2, num_kv_heads=8, head_size=128)
        try:
            one = once_more(serializer, spec=spec)
        except ValueError:
            return
        yield spec, one
        one.close()
