"""The models that a serializer is tried with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvloom import Chunk, KVSpec, MemoryFormat, Serializer
from kvloom_testkit.chunks import MODELS, PAGES, chunk_of, finite_chunks, pages_of
from kvloom_testkit.remaking import once_more, spec_of

REAL_TOKENS = (256, 257)
"""Lengths of chunks of real size."""


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
    """The serializer for a model of real size, whose chunks have MiBs, if it supports such KV."""
    if MemoryFormat.KV_BLOB in serializer.formats:
        spec = replace(spec_of(serializer), num_layers=2, num_kv_heads=8, head_size=128)
        try:
            one = once_more(serializer, spec=spec)
        except ValueError:
            return
        yield spec, one
        one.close()


def usual_chunk(serializer: Serializer, num_tokens: int = 7, *, seed: int = 0) -> Chunk:
    """A chunk that this serializer is for: of any bits if it is lossless, else of usual values."""
    spec = spec_of(serializer)
    if MemoryFormat.KV_BLOB not in serializer.formats:
        return pages_of(spec, PAGES[0], seed=seed)
    if serializer.lossless:
        return chunk_of(spec, num_tokens, seed=seed)
    chunk = finite_chunks(spec, num_tokens)
    return next(iter(chunk.values())) if not seed else chunk.get("outliers", next(iter(chunk.values())))
