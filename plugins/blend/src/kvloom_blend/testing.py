"""For tests: a retriever with an engine to fill."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from kvloom import BlendRetrieverTask, Engine, KVSpec
from kvloom_connector_transformers import RestoredKV

from .retrievers.passages import PassageRetriever

_KIT_SPEC = KVSpec(model="kit", num_layers=3, num_kv_heads=2, head_size=8, dtype="bfloat16")


class Library:
    """A retriever over an engine with memory only, or one that is given."""

    def __init__(self, component: Callable[[], PassageRetriever], engine: Engine | None = None) -> None:
        self.retriever = component()
        self.engine = engine or Engine.open(
            {"connector": "transformers", "chunk_tokens": 48, "tiers": [{"type": "memory", "capacity": "64MiB"}]},
            self.retriever.spec or _KIT_SPEC,
        )
        self.retriever.engine = self.engine

    def add(self, tokens: torch.Tensor, kv: torch.Tensor) -> None:
        """Keep a text whose tokens stood at positions 0, 1, ...; kv: `[2, layers, tokens, hidden]`."""
        self.engine.save(self.retriever.alone(tokens), cache=restored(self.engine.spec, kv)).result()
        self.retriever.learn(tokens)


def restored(spec: KVSpec, kv: torch.Tensor) -> RestoredKV:
    """KV `[2, layers, tokens, hidden]` as a cache that an engine can store from."""
    heads = (spec.num_kv_heads, spec.head_size)
    keys, values = (list(plane.unflatten(-1, heads).transpose(1, 2)[:, None].contiguous()) for plane in kv)
    return RestoredKV(keys, values)


def fixed(component: Callable[[], PassageRetriever]) -> Library:
    """For `kvloom check retriever fixed`."""
    return Library(component)


def separator(component: Callable[[], PassageRetriever]) -> Library:
    """For `kvloom check retriever separator --set separator=7`."""
    return Library(component)


separator.separator = (7,)  # type: ignore[attr-defined]


def explicit(component: Callable[[], PassageRetriever]) -> Library:
    """For `kvloom check retriever explicit`: a client that knows where passages begin, which is at each token 7."""
    library = Library(component)
    ask = library.retriever.new_request

    def told(tokens: torch.Tensor, starts: torch.Tensor, **more: Any) -> BlendRetrieverTask:
        requests = [tokens[begin:end] for begin, end in pairwise(starts.tolist())]
        marks = [(request == 7).nonzero().flatten().tolist() for request in requests]
        return ask(tokens, starts, boundaries=[[edge for at in one for edge in (at, at + 1)] for one in marks], **more)

    library.retriever.new_request = told  # type: ignore[method-assign]
    return library


explicit.separator = (7,)  # type: ignore[attr-defined]
