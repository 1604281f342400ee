"""The built-in components meet the requirements of their kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvloom import Observer, StorageBackend
from kvloom.builtin.chunked import ChunkedTokenDatabase
from kvloom.builtin.dict_backend import DictBackend
from kvloom.builtin.log import LogObserver
from kvloom.builtin.plain import PlainConnector
from kvloom.builtin.raw import RawSerializer
from kvloom_testkit import (
    BackendConformance,
    ConnectorConformance,
    ConnectorHarness,
    ObserverConformance,
    SerializerConformance,
    TokensConformance,
)
from kvloom_testkit.connectors.harnesses import plain
from kvloom_testkit.subjects import SPEC


class TestDict(BackendConformance):
    @pytest.fixture
    def make(self) -> Callable[[], StorageBackend]:
        return lambda: DictBackend(DictBackend.Config())


class TestLog(ObserverConformance):
    @pytest.fixture
    def make(self) -> Callable[[], Observer]:
        return lambda: LogObserver(LogObserver.Config(), SPEC)


class TestChunked(TokensConformance):
    @pytest.fixture
    def make(self) -> Callable[[], ChunkedTokenDatabase]:
        return lambda: ChunkedTokenDatabase(ChunkedTokenDatabase.Config(), SPEC)


class TestRaw(SerializerConformance):
    @pytest.fixture
    def make(self) -> Callable[[], RawSerializer]:
        return lambda: RawSerializer(RawSerializer.Config(), SPEC)


class TestPlain(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], ConnectorHarness]:
        return lambda: plain(lambda: PlainConnector(PlainConnector.Config(), SPEC))
