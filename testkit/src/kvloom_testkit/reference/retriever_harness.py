"""The retriever with a way to fill its store, which its tests need."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvloom_testkit.reference.retriever import PiecesRetriever


class Library:
    """The kit's harness: see `kvloom_testkit.retrievers.conformance.Library`."""

    def __init__(self, component: Callable[[], PiecesRetriever]) -> None:
        self.retriever = component()

    def add(self, tokens: torch.Tensor, kv: torch.Tensor) -> None:
        """Store a text whose tokens stood at positions 0, 1, ...; kv: `[2, layers, tokens, hidden]`."""
        self.retriever.add(tokens, kv)


harness = Library
