"""The serializer meets the requirements of the conformance kit in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvloom_serde_cachegen.serializer import CacheGenSerializer
from kvloom_testkit import SerializerConformance
from kvloom_testkit.subjects import SPEC


def maker(**settings: Any) -> Callable[[], CacheGenSerializer]:
    return lambda: CacheGenSerializer(CacheGenSerializer.Config.model_validate(settings), SPEC)


class TestStep(SerializerConformance):
    @pytest.fixture
    def make(self) -> Callable[[], CacheGenSerializer]:
        return maker()


class TestSmall(SerializerConformance):
    @pytest.fixture
    def make(self) -> Callable[[], CacheGenSerializer]:
        return maker(quality="small", codec_gate=False, threads=1)


class TestLossless(SerializerConformance):
    @pytest.fixture
    def make(self) -> Callable[[], CacheGenSerializer]:
        return maker(mode="lossless")


class TestBins(SerializerConformance):
    @pytest.fixture
    def make(self) -> Callable[[], CacheGenSerializer]:
        return maker(mode="cachegen")
