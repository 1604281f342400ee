"""Executors: they select the tokens to compute again."""

from __future__ import annotations

from .deviation import CacheBlendExecutor, HybridExecutor
from .static import EpicExecutor, FullExecutor, NoneExecutor, QuestionAttentionExecutor

EXECUTORS = (
    CacheBlendExecutor,
    HybridExecutor,
    QuestionAttentionExecutor,
    EpicExecutor,
    NoneExecutor,
    FullExecutor,
)

__all__ = [
    "EXECUTORS",
    "CacheBlendExecutor",
    "EpicExecutor",
    "FullExecutor",
    "HybridExecutor",
    "NoneExecutor",
    "QuestionAttentionExecutor",
]
