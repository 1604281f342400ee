"""The serializers meet the requirements of the conformance kit, as they are and with a cast."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvloom_serde_tensors.serializers import SafetensorsSerializer, TensorSerializer, TorchSerializer
from kvloom_testkit import SerializerConformance
from kvloom_testkit.subjects import SPEC


def maker(cls: type[TensorSerializer], **settings: str) -> Callable[[], TensorSerializer]:
    return lambda: cls(cls.Config.model_validate(settings), SPEC)


class TestTorch(SerializerConformance):
    @pytest.fixture
    def make(self) -> Callable[[], TensorSerializer]:
        return maker(TorchSerializer)


class TestTorchCast(SerializerConformance):
    slow = ("S11",)

    @pytest.fixture
    def make(self) -> Callable[[], TensorSerializer]:
        return maker(TorchSerializer, dtype="float16")


class TestSafetensors(SerializerConformance):
    @pytest.fixture
    def make(self) -> Callable[[], TensorSerializer]:
        return maker(SafetensorsSerializer)


class TestSafetensorsCast(SerializerConformance):
    slow = ("S11",)

    @pytest.fixture
    def make(self) -> Callable[[], TensorSerializer]:
        return maker(SafetensorsSerializer, dtype="float8_e4m3fn")
