"""The serializer meets the requirements of the conformance kit in every mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from profiles import profile_like

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
    slow = ("S11",)

    @pytest.fixture
    def make(self) -> Callable[[], CacheGenSerializer]:
        return maker(quality="small", codec_gate=False, threads=1)


class TestLossless(SerializerConformance):
    slow = ("S11",)

    @pytest.fixture
    def make(self) -> Callable[[], CacheGenSerializer]:
        return maker(mode="lossless")


class TestBins(SerializerConformance):
    slow = ("S11",)

    @pytest.fixture
    def make(self) -> Callable[[], CacheGenSerializer]:
        return maker(mode="cachegen")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "none.kvprofile"
    kv = torch.empty(SPEC.blob_shape(1), device="meta")
    profile_like(kv, heads=SPEC.num_kv_heads, sigma=2.0).save(path)
    return path


class TestKlt(SerializerConformance):
    @pytest.fixture
    def make(self, profile: Path) -> Callable[[], CacheGenSerializer]:
        return maker(mode="klt", profile=profile, codec_gate=False)
