"""Who finds stored KV for any part of a prompt."""

from __future__ import annotations

from .explicit import ExplicitRetriever
from .fixed import FixedRetriever
from .passages import Passage, PassageRetriever
from .separator import SeparatorRetriever

RETRIEVERS = (SeparatorRetriever, ExplicitRetriever, FixedRetriever)

__all__ = [
    "RETRIEVERS",
    "ExplicitRetriever",
    "FixedRetriever",
    "Passage",
    "PassageRetriever",
    "SeparatorRetriever",
]
