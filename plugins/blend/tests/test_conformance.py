"""The kit, for every executor and retriever of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, cast

import pytest
import torch

from kvloom import BlendExecutor, BlendRequest, BlendSession
from kvloom_blend import CacheBlendImpl
from kvloom_blend.executors import (
    CacheBlendExecutor,
    EpicExecutor,
    FullExecutor,
    HybridExecutor,
    NoneExecutor,
    QuestionAttentionExecutor,
)
from kvloom_blend.retrievers import (
    ContentRetriever,
    ExplicitRetriever,
    FixedRetriever,
    PassageRetriever,
    SeparatorRetriever,
)
from kvloom_blend.testing import Library, explicit
from kvloom_testkit import ExecutorConformance, RetrieverConformance
from kvloom_testkit.subjects import SPEC


def executor(cls: type[BlendExecutor], **settings: Any) -> type[ExecutorConformance]:
    """A test class that holds an executor to the kit. The question is taken to attend to tokens at random."""

    class Asked(cls):  # type: ignore[misc, valid-type]
        def begin(self, request: BlendRequest) -> BlendSession:
            def attention() -> torch.Tensor:
                return torch.rand(len(request.valid_mask), generator=torch.Generator().manual_seed(1))

            tokens, starts, mask = request.input_tokens, request.query_start_loc, request.valid_mask
            return cast(BlendSession, super().begin(BlendRequest(tokens, starts, mask, attention=attention)))

    @pytest.fixture
    def make(self: ExecutorConformance) -> Callable[[], BlendExecutor]:
        return lambda: Asked(cls.Config(**settings), SPEC)

    return type(cls.__name__, (ExecutorConformance,), {"make": make, "__module__": __name__})


TestNone = executor(NoneExecutor)
TestFull = executor(FullExecutor)
TestCacheBlend = executor(CacheBlendExecutor)
TestCacheBlendOfNothing = executor(CacheBlendExecutor, recompute_ratio=0.0)
TestCacheBlendOfAll = executor(CacheBlendExecutor, recompute_ratio=1.0)
TestGradual = executor(CacheBlendExecutor, check_layers=(0, 1, 2), metric="kv", recompute_ratio=0.3)
TestCacheBlendByK = executor(CacheBlendExecutor, metric="k", check_layers=(0,))
TestHybrid = executor(HybridExecutor, recompute_ratio=0.3)
TestQuestionAttention = executor(QuestionAttentionExecutor)
TestEpic = executor(EpicExecutor)
TestEpicOfSome = executor(EpicExecutor, tokens_per_passage=4)


class TestCacheBlendImpl(ExecutorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], BlendExecutor]:
        return lambda: CacheBlendImpl(0.15)


def libraries(make: Callable[[], Library]) -> Iterator[Callable[[], Library]]:
    """For a fixture `make`: the engines of the libraries are closed after the test."""
    with ExitStack() as engines:

        def library() -> Library:
            made = make()
            engines.callback(made.engine.close)
            return made

        yield library


def retriever(
    cls: type[PassageRetriever], between: tuple[int, ...] = (), **settings: Any
) -> type[RetrieverConformance]:
    """A test class that holds a retriever to the kit. between: the tokens that stand between texts."""

    @pytest.fixture
    def make(self: RetrieverConformance) -> Iterator[Callable[[], Library]]:
        yield from libraries(lambda: Library(lambda: cls(cls.Config(**settings), SPEC)))

    own = {"make": make, "__module__": __name__, "separator": between}
    return type(cls.__name__, (RetrieverConformance,), own)


TestSeparator = retriever(SeparatorRetriever, (7,), separator=7)
TestSeparatorOfSeveral = retriever(SeparatorRetriever, (7, 8, 7), separator=(7, 8, 7), in_context=False)
TestFixed = retriever(FixedRetriever, piece_tokens=32)
TestContent = retriever(ContentRetriever, piece_tokens=16)


class TestExplicit(RetrieverConformance):
    separator = (7,)

    @pytest.fixture
    def make(self) -> Iterator[Callable[[], Library]]:
        yield from libraries(lambda: explicit(lambda: ExplicitRetriever(ExplicitRetriever.Config(), SPEC)))
