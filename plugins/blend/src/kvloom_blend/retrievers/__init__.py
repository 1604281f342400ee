"""Retrievers: they find stored KV for any part of a prompt."""

from __future__ import annotations

from .content import ContentRetriever
from .explicit import ExplicitRetriever
from .fixed import FixedRetriever
from .passages import Passage, PassageRetriever
from .separator import SeparatorRetriever

__all__ = [
    "ContentRetriever",
    "ExplicitRetriever",
    "FixedRetriever",
    "Passage",
    "PassageRetriever",
    "SeparatorRetriever",
]
