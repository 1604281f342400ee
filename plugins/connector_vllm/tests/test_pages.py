"""`type: vllm` meets the requirements of the conformance kit."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from kvloom import ByteSize, Chunk, ChunkKey, KVSpec, Segment
from kvloom_connector_vllm import native
from kvloom_connector_vllm.paged.blobs import VLLMBlobConnector
from kvloom_connector_vllm.paged.blocks import VLLMConnector
from kvloom_connector_vllm.paged.layers import LayerEvents
from kvloom_connector_vllm.paged.settings import Geometry, VLLMConfig
from kvloom_testkit import ConnectorConformance, ConnectorHarness, EngineMemory
from kvloom_testkit.connectors.memories import done, same
from kvloom_testkit.devices.simulated import SimulatedDevice
from kvloom_testkit.subjects import SPEC

BLOCK_TOKENS = 4


class PagedMemory(EngineMemory):
    """Pages of several requests, the request's being scattered among them."""

    device = "cpu"

    def __init__(self, spec: KVSpec, num_tokens: int) -> None:
        count = -(-num_tokens // BLOCK_TOKENS)
        elements = BLOCK_TOKENS * spec.kv_planes * spec.hidden_dim
        chance = torch.Generator().manual_seed(num_tokens)
        self._blocks = torch.randperm(2 * count + 3, generator=chance)[:count].tolist()
        shape = (2 * count + 3, elements)
        self._pages = [
            torch.full(shape, 3.0, device=self.device, dtype=spec.torch_dtype) for _ in range(spec.num_layers)
        ]

    @property
    def where(self) -> Mapping[str, Any]:
        return {"pages": self._pages, "blocks": list(self._blocks)}

    def kv(self) -> torch.Tensor:
        return torch.stack([view[self._blocks] for view in self._pages], dim=1).cpu()

    def set_kv(self, kv: torch.Tensor) -> None:
        for layer, view in enumerate(self._pages):
            view[self._blocks] = kv[:, layer].to(self.device)

    def surroundings(self) -> bytes:
        rest = [block for block in range(len(self._pages[0])) if block not in self._blocks]
        return b"".join(view[rest].cpu().view(torch.uint8).numpy().tobytes() for view in self._pages)


def geometry(spec: KVSpec) -> Geometry:
    """The geometry of memory as this module makes it."""
    elements = BLOCK_TOKENS * spec.kv_planes * spec.hidden_dim
    return Geometry(layers=spec.num_layers, block_tokens=BLOCK_TOKENS, page_elements=elements)


ON_GPU = ["cuda native", "cuda torch"] if torch.cuda.is_available() else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All ways of `by`; where a requirement simulates devices of its own, only those that do not."""
    if "by" in metafunc.fixturenames:
        own = metafunc.function.__name__.startswith(("test_C19", "test_C20"))
        simulated = [] if own else ["simulated native", "simulated torch"]
        metafunc.parametrize("by", ["native", "torch", *simulated, *ON_GPU], indirect=True)


@pytest.fixture
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In one call of native code, and as it is where there was no compiler; in host memory, and on a device."""
    if "torch" in request.param:
        monkeypatch.setattr(native, "processor", lambda: None)
        monkeypatch.setattr(native, "kernels", lambda: None)
    if "cuda" in request.param:
        monkeypatch.setattr(PagedMemory, "device", "cuda")
    with SimulatedDevice(3).installed() if "simulated" in request.param else contextlib.nullcontext():
        yield


@pytest.mark.usefixtures("by")
class TestPages(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], ConnectorHarness]:
        def harness() -> ConnectorHarness:
            return ConnectorHarness(VLLMConnector(VLLMConfig(geometry=geometry(SPEC)), SPEC), PagedMemory, BLOCK_TOKENS)

        return harness


class KnownMemory(PagedMemory):
    """Pages whose order is known: that of a random permutation."""

    def __init__(self, spec: KVSpec, num_tokens: int) -> None:
        super().__init__(spec, num_tokens)
        self._spec = spec
        order = torch.randperm(self._pages[0].shape[1], generator=torch.Generator().manual_seed(7))
        self._order = order.to(self.device)

    @property
    def where(self) -> Mapping[str, Any]:
        return {**super().where, "order": self._order}

    def kv(self) -> torch.Tensor:
        pages = torch.stack([view[self._blocks].index_select(1, self._order) for view in self._pages]).cpu()
        shape = (len(pages), len(self._blocks), self._spec.kv_planes, BLOCK_TOKENS, self._spec.hidden_dim)
        return pages.view(shape).permute(2, 0, 1, 3, 4).flatten(2, 3)

    def set_kv(self, kv: torch.Tensor) -> None:
        blocks = torch.tensor(self._blocks, device=self.device)[:, None]
        pages = kv.unflatten(2, (-1, BLOCK_TOKENS)).permute(1, 2, 0, 3, 4).flatten(2).to(self.device)
        for view, layer in zip(self._pages, pages, strict=True):
            view[blocks, self._order] = layer


@pytest.mark.usefixtures("by")
class TestBlob(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], ConnectorHarness]:
        def harness() -> ConnectorHarness:
            one = VLLMBlobConnector(VLLMConfig(geometry=geometry(SPEC)), SPEC)
            return ConnectorHarness(one, KnownMemory, BLOCK_TOKENS)

        return harness


class SharedMemory(KnownMemory):
    """Pages of twice as many heads, of which every other element is another part's."""

    def __init__(self, spec: KVSpec, num_tokens: int) -> None:
        super().__init__(spec, num_tokens)
        self._pages = [torch.cat([view, view + 1], 1) for view in self._pages]
        self._order = self._order * 2

    def surroundings(self) -> bytes:
        others = [view[:, 1::2].cpu().contiguous().view(torch.uint8).numpy().tobytes() for view in self._pages]
        return super().surroundings() + b"".join(others)


@pytest.mark.usefixtures("by")
class TestPartOfABlob(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], ConnectorHarness]:
        def harness() -> ConnectorHarness:
            whole = geometry(SPEC)
            part = whole.model_copy(update={"surrounding_elements": whole.page_elements})
            return ConnectorHarness(VLLMBlobConnector(VLLMConfig(geometry=part), SPEC), SharedMemory, BLOCK_TOKENS)

        return harness


@pytest.mark.parametrize("axes", list(itertools.permutations(range(4))), ids=str)
@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_rows_are_moved_by_their_strides_as_torch_moves_elements(
    axes: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K and V, tokens and heads in any order in a page; where the elements of a head are apart, torch moves them."""
    sizes = (SPEC.kv_planes, BLOCK_TOKENS, SPEC.num_kv_heads, SPEC.head_size)
    shape = tuple(sizes[axis] for axis in axes)
    places = torch.arange(geometry(SPEC).page_elements).view(shape).permute(*(axes.index(axis) for axis in range(4)))
    order, chance = places.flatten().to(device), torch.Generator().manual_seed(5)
    pages = [
        torch.randint(0, 100, (9, order.numel() + 8), generator=chance).to(device, SPEC.torch_dtype)[:, : order.numel()]
        for _ in range(SPEC.num_layers)
    ]
    one = VLLMBlobConnector(VLLMConfig(geometry=geometry(SPEC)), SPEC)
    lengths = [2 * BLOCK_TOKENS, BLOCK_TOKENS, 3 * BLOCK_TOKENS]
    ends = [0, *itertools.accumulate(lengths)]
    segments = [Segment(a, b, ChunkKey("f/-", n, bytes(32))) for n, (a, b) in enumerate(itertools.pairwise(ends))]

    def moved() -> list[torch.Tensor]:
        chunks = [Chunk(torch.zeros(one.shape(n), dtype=SPEC.torch_dtype), one.format, n) for n in lengths]
        done(one.read(segments, chunks, pages=pages, blocks=[8, 0, 3, 2, 5, 1], order=order))
        into = [torch.zeros_like(view) for view in pages]
        done(one.write(segments, chunks, pages=into, blocks=[1, -1, 3, 0, -1, 8], order=order))
        return [chunk.tensor for chunk in chunks] + into

    assert (one._about(order).strides is not None) == (axes[3] == 3)
    found = moved()
    monkeypatch.setattr(native, "runner", lambda device: None)
    assert all(torch.equal(a, b) for a, b in zip(found, moved(), strict=True))
    assert all(tensor.any() for tensor in found)


def connector() -> VLLMConnector:
    return VLLMConnector(VLLMConfig(geometry=geometry(SPEC)), SPEC)


@pytest.mark.parametrize(("change", "said"), [
    ({"pages": []}, "0 layers"),
    ({"blocks": [0, 99]}, "no block 99"),
    ({"blocks": [0, -2]}, "no block -2"),
    ({"blocks": [0, 1, 2]}, "end at token 12 of the sequence, not 16"),
    ({"slot_mapping": []}, "expected pages="),
])  # fmt: skip
def test_what_is_not_there_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    memory = PagedMemory(SPEC, 16)
    with pytest.raises(ValueError, match=said):
        connector().check({**memory.where, **change}, 16)


def test_memory_of_another_shape_is_refused_by_name() -> None:
    memory, one = PagedMemory(SPEC, 16), connector()
    pages = memory.where["pages"]
    for wrong in (pages[1][:, :-1], pages[1].double(), pages[1].t().contiguous().t()):
        with pytest.raises(ValueError, match="pages: layer 1 is"):
            one.check({**memory.where, "pages": [pages[0], wrong, *pages[2:]]}, 16)
    with pytest.raises(ValueError, match="num_tokens: 6 is not a whole number of blocks of 4"):
        one.shape(6)


@pytest.mark.usefixtures("by")
def test_reading_needs_every_block() -> None:
    harness = ConnectorHarness(connector(), PagedMemory, BLOCK_TOKENS)
    memory, segments = harness.engine(), harness.segments(4)
    where = memory.where
    with pytest.raises(ValueError, match="tokens 0 to 16 are left out"):
        harness.connector.read(segments, harness.chunks(segments), **{**where, "blocks": [-1, *where["blocks"][1:]]})
    with pytest.raises(ValueError, match="begin at block 1 of the sequence, not 0"):
        harness.connector.read(segments, harness.chunks(segments), **{**where, "first_block": 1})


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("left_out", [[], [0], [3], [1, 2], [0, 1, 2, 3]])
def test_blocks_that_are_left_out_are_left_alone(left_out: list[int]) -> None:
    harness = ConnectorHarness(connector(), PagedMemory, BLOCK_TOKENS)
    source, target, segments = harness.engine(seed=1), harness.engine(blank=True), harness.segments(4)
    chunks = harness.read(segments, source)
    before, where = target.kv(), target.where
    blocks = [-1 if index in left_out else block for index, block in enumerate(where["blocks"])]
    done(harness.connector.write(segments, chunks, **{**where, "blocks": blocks}))
    for index in range(4):
        expected = before if index in left_out else source.kv()
        assert torch.equal(target.kv()[index].view(torch.uint8), expected[index].view(torch.uint8))


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("kind", [VLLMConnector, VLLMBlobConnector])
@pytest.mark.parametrize("verb", ["read", "write"])
def test_too_few_blocks_move_nothing(kind: type[VLLMConnector], verb: str) -> None:
    """The list is the caller's, who may have changed it since `check`."""
    memory = KnownMemory if kind is VLLMBlobConnector else PagedMemory
    harness = ConnectorHarness(kind(VLLMConfig(geometry=geometry(SPEC)), SPEC), memory, BLOCK_TOKENS)
    engine, segments = harness.engine(), harness.segments(2, 2)
    before = engine.kv()
    with pytest.raises(ValueError, match="blocks: "):
        getattr(harness.connector, verb)(
            segments, harness.chunks(segments), **{**engine.where, "blocks": engine.where["blocks"][:3]}
        )
    assert same(engine.kv(), before)


def test_pages_that_are_given_other_memory_are_looked_at_again() -> None:
    memory, one = PagedMemory(SPEC, 16), connector()
    pages = tuple(memory.where["pages"])
    one.check({"pages": pages, "blocks": [8, 0, 1, 2]}, 16)
    pages[1].set_(torch.zeros(4, pages[1].shape[1], dtype=SPEC.torch_dtype))
    with pytest.raises(ValueError, match="no block 8; there are 4"):
        one.check({"pages": pages, "blocks": [8, 0, 1, 2]}, 16)


@pytest.mark.parametrize("wrong", [torch.tensor(0.0), torch.zeros(3, 4, 5), torch.zeros(3, 4).to_sparse()])
def test_what_are_no_pages_is_refused(wrong: torch.Tensor) -> None:
    memory = PagedMemory(SPEC, 16)
    pages = [memory.where["pages"][0], wrong.to(SPEC.torch_dtype), memory.where["pages"][2]]
    with pytest.raises(ValueError, match="pages: layer 1 is"):
        connector().check({**memory.where, "pages": pages}, 16)


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("kind", [VLLMConnector, VLLMBlobConnector])
def test_no_segments_are_no_move(kind: type[VLLMConnector]) -> None:
    memory = KnownMemory if kind is VLLMBlobConnector else PagedMemory
    one = kind(VLLMConfig(geometry=geometry(SPEC)), SPEC)
    assert one.read([], [], **memory(SPEC, 16).where) is None and one.write([], [], **memory(SPEC, 16).where) is None


def test_without_its_geometry_it_says_who_has_it() -> None:
    with pytest.raises(ValueError, match="--kv-transfer-config"):
        VLLMConnector(VLLMConfig(), SPEC)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_native_code_copies_what_torch_does(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of several lengths at once, pages of one tensor for all layers, blocks in runs and scattered."""
    chance = torch.Generator().manual_seed(3)
    spec = dataclasses.replace(SPEC, dtype=dtype)
    elements = BLOCK_TOKENS * spec.kv_planes * spec.hidden_dim
    one = VLLMConnector(VLLMConfig(geometry=geometry(spec)), spec)
    whole = torch.randint(0, 100, (30, spec.num_layers, elements), generator=chance).to(spec.torch_dtype)
    pages = [whole[:, layer] for layer in range(spec.num_layers)]
    blocks = [5, 6, 7, 8, 29, 0, 1, 17, 3]
    ends = [0, 4 * BLOCK_TOKENS, 5 * BLOCK_TOKENS, 9 * BLOCK_TOKENS]
    segments = [Segment(a, b, ChunkKey("f/-", n, bytes(32))) for n, (a, b) in enumerate(itertools.pairwise(ends))]

    def read() -> list[torch.Tensor]:
        chunks = [
            Chunk(torch.zeros(one.shape(s.end - s.start), dtype=spec.torch_dtype), one.format, s.end - s.start)
            for s in segments
        ]
        one.read(segments, chunks, pages=pages, blocks=blocks)
        into = [torch.zeros_like(whole[:, layer]) for layer in range(spec.num_layers)]
        one.write(segments, chunks, pages=into, blocks=[20, -1, 22, 23, 4, 5, -1, 6, 0])
        return [chunk.tensor for chunk in chunks] + into

    found = read()
    monkeypatch.setattr(native, "processor", lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(found, read(), strict=True))
    assert any(chunk.any() for chunk in found)


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("block", [1000, -2])
def test_a_copy_does_not_leave_the_pages(block: int) -> None:
    harness = ConnectorHarness(connector(), PagedMemory, BLOCK_TOKENS)
    memory, segments = harness.engine(), harness.segments(4)
    where = {**memory.where, "blocks": [block, 0, 1, 2]}
    refused = (ValueError, IndexError, RuntimeError)  # torch has words of its own
    with pytest.raises(refused, match=r"no block (1000|-2)|left out|out of (range|bounds)"):
        harness.connector.read(segments, harness.chunks(segments), **where)
    if block > 0:
        with pytest.raises(refused, match=r"no block 1000|out of (range|bounds)"):
            harness.connector.write(segments, harness.read(segments, memory), **where)


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("wrong", ["narrower", "dtype"])
def test_other_pages_are_not_copied(verb: str, wrong: str) -> None:
    harness = ConnectorHarness(connector(), PagedMemory, BLOCK_TOKENS)
    memory, segments = harness.engine(), harness.segments(4)
    pages = [view[:, :-1] if wrong == "narrower" else view.view(torch.int16) for view in memory.where["pages"]]
    with pytest.raises((ValueError, IndexError, RuntimeError, UserWarning)):
        done(getattr(harness.connector, verb)(segments, harness.chunks(segments), **{**memory.where, "pages": pages}))


@pytest.mark.parametrize(("chunks", "layers", "blocks"), [(1, 2, 16), (8, 32, 1), (64, 2, 16), (64, 32, 1)])
@pytest.mark.parametrize("verb", ["read", "write"])
def test_the_work_that_is_queued_is_the_same_for_every_move(verb: str, chunks: int, layers: int, blocks: int) -> None:
    """A launch and a batch of copies for each filling of a buffer, and no memory but the buffers."""
    many = Counted(chunks, layers, blocks)
    assert many.work(verb, fillings=1) == [(1, 1, 1), (1, 1, 1), (1, 1, 0)], "the second time, the other buffer"
    assert chunks < 8 or many.work(verb, fillings=8) == [(8, 8, 2), (8, 8, 0), (8, 8, 0)]


@pytest.mark.parametrize(("chunks", "layers"), [(1, 2), (8, 32), (64, 2)])
def test_by_layer_it_is_so_for_each_layer(chunks: int, layers: int) -> None:
    each = (layers, layers, 2), (layers, layers, 0), (layers, layers, 0)
    assert Counted(chunks, layers, 16).work("write", fillings=1, by_layer=True) == [*each]


class ByLibrary(VLLMConnector):
    """Fails where torch would move pages: by several launches, which the simulation counts as one."""

    def _by_torch(self, *args: Any, **how: Any) -> None:
        raise AssertionError("the library was not used")


class Counted:
    """Moves on a device that counts: launches, batches of copies, and pieces of memory of each."""

    def __init__(self, chunks: int, layers: int, blocks: int) -> None:
        self.spec = KVSpec("m", layers, 1, 2, "bfloat16")
        elements = 2 * BLOCK_TOKENS * self.spec.hidden_dim
        self.nbytes = -(-layers * blocks * elements * 2 // 256) * 256 * chunks
        self.geometry = Geometry(layers=layers, block_tokens=BLOCK_TOKENS, page_elements=elements)
        self.tokens = blocks * BLOCK_TOKENS
        self.segments = [
            Segment(n * self.tokens, (n + 1) * self.tokens, ChunkKey("0/-", n, bytes(32))) for n in range(chunks)
        ]
        pages = tuple(torch.zeros(chunks * blocks, elements, dtype=torch.bfloat16) for _ in range(layers))
        self.where = {"pages": pages, "blocks": list(range(chunks * blocks))}

    def work(self, verb: str, *, fillings: int, by_layer: bool = False) -> list[tuple[int, int, int]]:
        """Return the launches, copies and allocations of three moves in turn, each filling buffers that often."""
        device, counts = SimulatedDevice(1), []
        with device.installed():
            staging = ByteSize(2 * self.nbytes // fillings)
            connector = ByLibrary(VLLMConfig(geometry=self.geometry, staging=staging), self.spec)
            rooms = [torch.zeros(connector.shape(self.tokens), dtype=torch.bfloat16) for _ in self.segments]
            own = [Chunk(tensor, connector.format, self.tokens) for tensor in rooms]
            for _ in range(3):
                before = device.queued, device.copies, device.allocations
                more = {"layer_events": LayerEvents(self.spec.num_layers, len(own))} if by_layer else {}
                done(getattr(connector, verb)(self.segments, own, **self.where, **more))
                queued, copies, allocations = (now - then for now, then in zip(
                    (device.queued, device.copies, device.allocations), before, strict=True
                ))  # fmt: skip
                counts.append((queued - copies, copies, allocations))
        return counts


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("kind", [VLLMConnector, VLLMBlobConnector])
@pytest.mark.parametrize("staging", [2, 2048])
def test_by_layer_the_same_is_written(kind: type[VLLMConnector], staging: int) -> None:
    """Chunks have several sizes, and blocks are left out."""
    one = kind(VLLMConfig(geometry=geometry(SPEC), staging=ByteSize(staging)), SPEC)
    memory = (PagedMemory if kind is VLLMConnector else KnownMemory)(SPEC, 24)
    order = {name: what for name, what in memory.where.items() if name == "order"}
    ends = [0, 8, 12, 24]
    segments = [Segment(a, b, ChunkKey("f/-", n, bytes(32))) for n, (a, b) in enumerate(itertools.pairwise(ends))]
    chance = torch.Generator().manual_seed(3)
    chunks = [
        Chunk(
            torch.randn(one.shape(s.end - s.start), generator=chance).to(SPEC.torch_dtype), one.format, s.end - s.start
        )
        for s in segments
    ]
    written = []
    for events in (None, LayerEvents(SPEC.num_layers, 3), LayerEvents(SPEC.num_layers, 4)):
        pages = [torch.zeros_like(view) for view in memory.where["pages"]]
        where = {"pages": pages, "blocks": [5, -1, 2, 7, -1, 0], **order, "layer_events": events}
        done(one.write(segments, chunks, **where))
        written.append(torch.stack(pages))
        if events is not None:
            assert len(events._queued) == (SPEC.num_layers if events.chunks == 3 else 0)
    assert torch.equal(written[0], written[1]) and torch.equal(written[0], written[2]) and written[0].any()
