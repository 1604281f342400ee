"""Every reference component meets every requirement of its kind: `kvloom new` writes these, under other names."""

from __future__ import annotations

from kvloom_testkit.reference.connector import SlotsConnector
from kvloom_testkit.reference.executor import NoneExecutor
from kvloom_testkit.reference.full_executor import FullExecutor
from kvloom_testkit.reference.half_serializer import HalfSerializer
from kvloom_testkit.reference.observer import CountingObserver
from kvloom_testkit.reference.retriever import PiecesRetriever
from kvloom_testkit.reference.serializer import RowsSerializer
from kvloom_testkit.reference.tokens import EvenTokenDatabase
from kvloom_testkit.subjects import Subject


def held(kind: str, cls: type) -> type:
    return Subject(kind, cls.type, cls).tests()  # type: ignore[attr-defined]


TestRows = held("serializer", RowsSerializer)
TestHalf = held("serializer", HalfSerializer)
TestHalf.slow = ("S11",)  # type: ignore[attr-defined]
TestEven = held("tokens", EvenTokenDatabase)
TestSlots = held("connector", SlotsConnector)
TestPieces = held("blend retriever", PiecesRetriever)
TestNone = held("blend executor", NoneExecutor)
TestFull = held("blend executor", FullExecutor)
TestCounting = held("observer", CountingObserver)
