"""Memory of the host that is pinned for devices, slab by slab."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_support import eventually
from hypothesis import given
from hypothesis import strategies as st

from kvloom import ConfigError, Engine
from kvloom.memory import Pool, pages, pinning
from kvloom.memory import pool as pools
from kvloom.numa import Node
from kvloom.runtime import SystemRuntime

PAGE = 4096
SLAB = 16 * PAGE
RUNTIME = SystemRuntime()


class Registrar:
    """Keeps what it is told to pin, and says no after `limit` slabs."""

    def __init__(self, *, ready: bool = True, limit: int = 1000) -> None:
        self.is_ready = ready
        self.limit = limit
        self.slabs: list[tuple[int, int]] = []
        self.gone: list[int] = []
        self.home: Node | None = None
        self.present: Callable[[int], bool] = lambda end: True

    def ready(self) -> bool:
        return self.is_ready

    def node(self) -> Node | None:
        return self.home

    def register(self, address: int, nbytes: int) -> bool:
        assert self.present(address + nbytes), "only pages that are there"
        if len(self.slabs) == self.limit:
            return False
        self.slabs.append((address, nbytes))
        return True

    def unregister(self, address: int) -> None:
        self.gone.append(address)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "SLAB_BYTES", SLAB)
    monkeypatch.setattr(pages, "_AHEAD_BYTES", 2 * PAGE)
    monkeypatch.setattr(pages, "_STEP_BYTES", PAGE)


@pytest.fixture
def make() -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(registrar: Registrar, slabs: int = 4) -> Pool:
        made.append(Pool(slabs * SLAB, RUNTIME, pin=registrar))
        one, base = made[-1].pages, made[-1].pages.bytes.data_ptr()
        registrar.present = lambda end: one._present >= end - base  # type: ignore[union-attr]
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def settle(pool: Pool) -> None:
    until = RUNTIME.now() + 20
    while not pool.pages.settled:
        assert RUNTIME.now() < until
        RUNTIME.sleep(0.001)


Make = Callable[..., Pool]
linux = pytest.mark.skipif("sys.platform != 'linux'", reason="pages are made present on Linux only")


@linux
def test_slabs_are_pinned_in_order_as_they_come_into_use(make: Make) -> None:
    registrar = Registrar()
    pool = make(registrar)
    settle(pool)
    base = pool.pages.bytes.data_ptr()
    assert registrar.slabs == [(base, SLAB)] and pool.pages.pinned_bytes == SLAB
    reservations = [pool.reserve(SLAB) for _ in range(2)]
    settle(pool)
    assert registrar.slabs == [(base, SLAB), (base + SLAB, SLAB), (base + 2 * SLAB, SLAB)], "a little ahead"
    for reservation in reservations:
        assert reservation is not None
        reservation.abandon()
    pool.close()
    assert registrar.gone == [base + 2 * SLAB, base + SLAB, base] and pool.pages.pinned_bytes == 0


@linux
def test_memory_is_taken_from_the_node_of_the_device_before_it_is_pinned(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    registrar, bound, moved = Registrar(), list[tuple[object, ...]](), list[frozenset[int]]()
    registrar.home = Node(1, frozenset({5}))

    def bind(*given: object) -> bool:
        assert not registrar.slabs
        bound.append(given)
        return False

    monkeypatch.setattr(pages, "bind", bind)
    monkeypatch.setattr(RUNTIME, "run_on", moved.append)
    pool = make(registrar)
    settle(pool)
    reservation = pool.reserve(SLAB)
    settle(pool)
    assert len(registrar.slabs) == 2 and bound == [(registrar.home, pool.pages.bytes.data_ptr(), 4 * SLAB)]
    assert moved == [{5}], "threads that use the memory"
    assert reservation is not None
    reservation.abandon()


@linux
def test_what_was_in_use_before_cuda_was_is_pinned_afterwards(make: Make) -> None:
    registrar = Registrar(ready=False)
    pool = make(registrar)
    reservation = pool.reserve(SLAB)
    settle(pool)
    assert registrar.slabs == []
    registrar.is_ready = True
    more = pool.reserve(PAGE)
    settle(pool)
    assert [nbytes for _, nbytes in registrar.slabs] == [SLAB, SLAB]
    for one in (reservation, more):
        assert one is not None
        one.abandon()


@linux
def test_a_pool_that_is_wholly_in_use_is_pinned_too(make: Make) -> None:
    registrar = Registrar(ready=False)
    pool = make(registrar)
    reservations = [pool.reserve(SLAB) for _ in range(4)]
    settle(pool)
    registrar.is_ready = True
    assert reservations[0] is not None
    reservations[0].abandon()
    reservations[0] = pool.reserve(PAGE)
    settle(pool)
    assert pool.pages.pinned_bytes == 4 * SLAB
    for reservation in reservations:
        assert reservation is not None
        reservation.abandon()


@linux
def test_pinning_that_fails_is_said_once_and_harms_nobody(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    registrar = Registrar(limit=2)
    pool = make(registrar)
    reservations = [pool.reserve(SLAB) for _ in range(4)]
    assert all(reservations)
    settle(pool)
    assert pool.pages.pinned_bytes == 2 * SLAB and pool.pages._present == 4 * SLAB
    (record,) = caplog.records
    assert record.getMessage().startswith(f"only {2 * SLAB} of {4 * SLAB} bytes of the pool could be pinned")
    for reservation in reservations:
        assert reservation is not None
        reservation.abandon()
    pool.close()
    assert len(registrar.gone) == 2


@linux
def test_closing_waits_for_a_slab_that_is_being_pinned_and_unpins_it(make: Make) -> None:
    registrar, begun, go_on = Registrar(), threading.Event(), threading.Event()
    register = registrar.register

    def slowly(address: int, nbytes: int) -> bool:
        if registrar.slabs:
            begun.set()
            assert go_on.wait(20)
        return register(address, nbytes)

    registrar.register = slowly  # type: ignore[method-assign]
    pool = make(registrar)
    reservation = pool.reserve(SLAB)
    assert reservation is not None and begun.wait(20)
    threading.Timer(0.05, go_on.set).start()
    pool.close()
    assert sorted(registrar.gone) == sorted(address for address, _ in registrar.slabs)
    assert len(registrar.gone) == 2


def test_no_reservation_spans_two_slabs(make: Make) -> None:
    pool = make(Registrar())
    assert pool.largest_bytes == SLAB and pool.reserve(SLAB + 1) is None
    reservations = []
    while (reservation := pool.reserve(5 * PAGE)) is not None:
        assert reservation.start // SLAB == (reservation.start + reservation.size - 1) // SLAB
        reservations.append(reservation)
    assert len(reservations) == 12
    for reservation in reservations:
        reservation.abandon()
    whole = [pool.reserve(SLAB) for _ in range(4)]
    assert all(whole), "each slab is one piece again"
    for reservation in whole:
        reservation.abandon()


def test_without_a_pinner_there_are_no_slabs() -> None:
    pool = Pool(4 * SLAB, RUNTIME, pin=False)
    assert pool.largest_bytes == 4 * SLAB
    pool.close()


@given(size=st.integers(0, 5000 * SLAB), piece=st.integers(0, 10 * SLAB))
def test_slabs_are_long_enough_for_what_is_put_into_them(size: int, piece: int) -> None:
    size = size // PAGE * PAGE
    ends = pages._slab_ends(size, piece)
    lengths = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    assert sum(lengths) == size and ends[-1] == size and all(end % PAGE == 0 for end in ends)
    assert len(ends) == 1 or min(lengths) >= max(SLAB, 32 * piece) - PAGE
    assert max(lengths) < 2 * max(SLAB, 32 * piece) + len(ends) * PAGE


def test_an_eager_pool_is_present_and_pinned_before_it_is_used() -> None:
    registrar = Registrar()
    one = Pool(4 * SLAB, RUNTIME, pin=registrar, eager=True)
    eventually(lambda: one.pages.settled)
    assert one.pages.pinned_bytes == 4 * SLAB == sum(nbytes for _, nbytes in registrar.slabs)
    one.close()


def test_an_eager_pool_takes_no_memory_where_nothing_can_be_pinned() -> None:
    one = Pool(4 * SLAB, RUNTIME, pin=Registrar(ready=False), eager=True)
    eventually(lambda: one.pages.settled)
    assert isinstance(one.pages, pages.Pages) and one.pages._present < 4 * SLAB
    one.close()


@pytest.mark.parametrize(("pin", "slabs"), [("eager", 16), ("auto", 1), ("never", 0)])
def test_a_configuration_says_when(
    open_engine: Callable[..., Engine], pin: str, slabs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "pinner_for", lambda pin: Registrar() if pin else None)
    engine = open_engine({"type": "memory", "capacity": "1MiB", "pin": pin})
    assert engine.memory is not None
    memory = engine.memory.pool.pages
    assert eventually(lambda: memory.settled)
    assert memory.pinned_bytes == slabs * SLAB
    with pytest.raises(ConfigError, match=r"tiers.0.pin"):
        open_engine({"type": "memory", "pin": "sometimes"})


# -- CUDA, as far as it can be tried without ---------------------------------------------------------------------------


class Cuda(SimpleNamespace):
    """The attributes of `torch.cuda` that may be used; anything else is an AttributeError."""

    def __init__(self) -> None:
        super().__init__(initialized=False, calls=[], error=0)

    def is_initialized(self) -> bool:
        return self.initialized

    def current_device(self) -> int:
        assert self.initialized, "this would initialise it"
        return 3

    def device(self, index: int) -> Any:
        self.calls.append(("device", index))
        return torch.device("cpu")

    def cudart(self) -> Any:
        assert self.initialized
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, nbytes, flags))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


def test_cuda_is_used_only_once_somebody_else_has_initialised_it() -> None:
    cuda = Cuda()
    pinner = pinning.CudaPinner(cuda)
    assert not pinner.ready() and cuda.calls == []
    cuda.initialized = True
    assert pinner.ready()
    assert pinner.register(8192, 4096)
    cuda.error = 2
    assert not pinner.register(8192, 4096)
    pinner.unregister(8192)
    on = ("device", 3)
    assert cuda.calls == [on, ("register", 8192, 4096, 1), on, ("register", 8192, 4096, 1), on, ("unregister", 8192)]


def test_torch_without_cuda_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert pinning.pinner_for("auto") is None and pinning.pinner_for(True) is None
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert isinstance(pinning.pinner_for("auto"), pinning.CudaPinner) and pinning.pinner_for(False) is None
