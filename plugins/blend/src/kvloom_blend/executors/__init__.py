"""Who decides which tokens are computed again."""

from __future__ import annotations

from .deviation import CacheBlendExecutor, HybridExecutor
from .static import EpicExecutor, FullExecutor, NoneExecutor, QuestionAttentionExecutor

__all__ = [
    "CacheBlendExecutor",
    "EpicExecutor",
    "FullExecutor",
    "HybridExecutor",
    "NoneExecutor",
    "QuestionAttentionExecutor",
]
