"""Pages of every layout: torch and the library against a plain loop, and what is refused."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import Chunk, ChunkKey, Engine, KVSpec, MemoryFormat, Segment
from kvloom_connector_vllm import native
from kvloom_connector_vllm.paged.connector import PagedConnector
from kvloom_connector_vllm.paged.layout import ORDERS, PagedLayout
from kvloom_connector_vllm.paged.move import Move, by_torch
from kvloom_connector_vllm.paged.table import PageTable

DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint8")
FORMS = ("pair", "leading 2", "second 2", "joined", "whole", "whole pairs")
many = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))


@dataclass
class Pages:
    """An engine's pages: what it passes, and the same memory by its meaning."""

    kvcaches: Any
    planes: list[torch.Tensor]
    """Views, `[layers, blocks, block size, heads, head size]`."""


def pages_of(spec: KVSpec, form: str, name: str, blocks: int, size: int, seed: int) -> Pages:
    """name: of the physical order; `nhd` and `hnd` are the orders LBNHC and LBHNC."""
    order = {"nhd": "LBNHC", "hnd": "LBHNC"}.get(name, name)
    sizes = {"L": spec.num_layers, "B": blocks, "H": spec.num_kv_heads, "N": size, "C": spec.head_size}
    if form in ("joined", "whole"):
        sizes["C"] *= spec.kv_planes
    planes = 1 if form in ("joined", "whole") else spec.kv_planes
    shape = [planes, *(sizes[axis] for axis in order)]
    nbytes = int(np.prod(shape)) * spec.torch_dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    physical = raw.view(spec.torch_dtype).view(shape)
    axes = [0, *(order.index(axis) + 1 for axis in "LBHNC")]
    each = physical.permute(axes)  # [planes, L, B, H, N, C]
    planes_of = list(each.transpose(3, 4))
    if form in ("joined", "whole"):
        planes_of = list(planes_of[0].split(spec.head_size, -1))
    passed = each.transpose(3, 4) if name == "nhd" else each
    match form:
        case "pair":
            kvcaches: Any = [tuple(layer) for layer in passed.transpose(0, 1)]
        case "leading 2":
            kvcaches = list(passed.transpose(0, 1))
        case "second 2":
            kvcaches = list(passed.permute(1, 2, 0, 3, 4, 5))
        case "joined":
            kvcaches = list(passed[0])
        case "whole":
            kvcaches = physical[0]
        case _:
            kvcaches = physical
    return Pages(kvcaches, planes_of)


@st.composite
def cases(draw: st.DrawFn) -> tuple[KVSpec, str, str, int, int, int]:
    planes = draw(st.integers(1, 2))
    heads, size, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(3, 9))
    spec = KVSpec("m", draw(st.integers(1, 3)), heads, draw(st.integers(1, 9)), draw(st.sampled_from(DTYPES)),
                  kv_planes=planes)  # fmt: skip
    form = draw(st.sampled_from(FORMS if planes == 2 else ("pair", "whole")))
    name = draw(st.sampled_from(ORDERS if form.startswith("whole") else ("nhd", "hnd", *ORDERS)))
    return spec, form, name, blocks, size, draw(st.integers(0, 10**6))


def chunk_of(spec: KVSpec, tokens: int, seed: int, layers: int | None = None) -> Chunk:
    shape = (spec.kv_planes, layers or spec.num_layers, tokens, spec.hidden_dim)
    nbytes = int(np.prod(shape)) * spec.torch_dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Chunk(raw.view(spec.torch_dtype).view(shape), MemoryFormat.KV_BLOB, tokens)


def segments_of(sizes: list[int], gap: int, start: int) -> list[Segment]:
    found, at = [], start
    for size in sizes:
        found.append(Segment(at, at + size, ChunkKey("0/-", len(found), bytes(32))))
        at += size + gap
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def all_bits(pages: Pages) -> bytes:
    return b"".join(map(bits, pages.planes))


def by_loop(pages: Pages, slots: list[int], chunk: torch.Tensor, to_pages: bool) -> None:
    """The reference, token by token."""
    for p, layer in itertools.product(range(chunk.shape[0]), range(chunk.shape[1])):
        view = pages.planes[p][layer]
        blocks, size, heads, content = view.shape
        for token, slot in enumerate(slots):
            if slot < 0:
                continue
            assert slot < blocks * size
            for head in range(heads):
                theirs = view[slot // size, slot % size, head]
                mine = chunk[p, layer, token, head * content : (head + 1) * content]
                theirs.copy_(mine) if to_pages else mine.copy_(theirs)


def connector_of(spec: KVSpec, layout: str, monkeypatch: pytest.MonkeyPatch, by: str) -> PagedConnector:
    if by == "torch":
        monkeypatch.setattr(native, "processor", lambda: None)
    elif native.processor() is None:
        pytest.skip("installed without its libraries, because there is no C++ compiler")
    return PagedConnector(PagedConnector.Config(layout=layout), spec)


@pytest.mark.parametrize("by", ["torch", "the library"])
@many
@given(case=cases(), data=st.data())
def test_it_moves_what_a_loop_moves(case: Any, data: st.DataObject, by: str) -> None:
    spec, form, name, blocks, size, seed = case
    with pytest.MonkeyPatch.context() as patch:
        connector = connector_of(spec, name, patch, by)
        sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
        segments = segments_of(sizes, data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3)))
        tokens = segments[-1].end
        order = data.draw(st.permutations(range(blocks * size + tokens)))
        slots = [slot % (blocks * size) for slot in order[:tokens]]
        pages, expected = (pages_of(spec, form, name, blocks, size, seed) for _ in range(2))
        where = {"kvcaches": pages.kvcaches, "slot_mapping": torch.tensor(slots)}
        connector.check(where, tokens)
        chunks, wanted = ([chunk_of(spec, n, seed + 1) for n in sizes] for _ in range(2))
        connector.read(segments, chunks, **where)
        for segment, chunk, want in zip(segments, chunks, wanted, strict=True):
            by_loop(expected, slots[segment.start : segment.end], want.tensor, to_pages=False)
            assert bits(chunk.tensor) == bits(want.tensor)
        # To write, each slot once; some are left alone.
        slots = [
            -1 if data.draw(st.integers(0, 4)) == 0 or slot in slots[:at] else slot for at, slot in enumerate(slots)
        ]
        layer = data.draw(st.one_of(st.none(), st.integers(0, spec.num_layers - 1)))
        fresh = [chunk_of(spec, n, seed + 2 + at) for at, n in enumerate(sizes)]
        where["slot_mapping"] = torch.tensor(slots, dtype=torch.int32)
        if layer is None:
            connector.write(segments, fresh, **where)
        else:
            views = [Chunk(c.tensor[:, layer : layer + 1], c.format, c.num_tokens) for c in fresh]
            connector.write_layer(layer, segments, views, **where)
        for segment, chunk in zip(segments, fresh, strict=True):
            only = slice(None) if layer is None else slice(layer, layer + 1)
            target = Pages(None, [views[only] for views in expected.planes])
            by_loop(target, slots[segment.start : segment.end], chunk.tensor[:, only], to_pages=True)
        assert all_bits(pages) == all_bits(expected)


@many
@given(size=st.integers(1, 5), ratio=st.integers(1, 3), tokens=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_a_block_table_is_a_slot_mapping(size: int, ratio: int, tokens: int, seed: int) -> None:
    """Also where an entry is of several blocks of the tensors."""
    spec = KVSpec("m", 2, 6, 3, "float32")
    count = -(-tokens // (size * ratio))
    pages = pages_of(spec, "joined", "hnd", 2 * count * ratio, size, seed)
    table = torch.randperm(2 * count, generator=torch.Generator().manual_seed(seed))
    slots = [int(table[t // (size * ratio)]) * size * ratio + t % (size * ratio) for t in range(tokens)]
    connector = PagedConnector(PagedConnector.Config(layout="LBHNC"), spec)
    (segment,), one, other = segments_of([tokens], 0, 0), chunk_of(spec, tokens, 1), chunk_of(spec, tokens, 2)
    table[count:] = -1
    where = {"kvcaches": pages.kvcaches, "block_table": table, "block_size": size * ratio}
    connector.check(where, tokens)
    connector.read([segment], [one], **where)
    connector.read([segment], [other], kvcaches=pages.kvcaches, slot_mapping=torch.tensor(slots))
    assert bits(one.tensor) == bits(other.tensor)


SPEC = KVSpec("m", 2, 2, 8, "bfloat16")


def given_where(**other: Any) -> dict[str, Any]:
    kvcaches = pages_of(SPEC, "joined", "hnd", 5, 4, 0).kvcaches
    return {"kvcaches": kvcaches, "slot_mapping": torch.arange(16)} | other


def tables(entries: list[int]) -> dict[str, Any]:
    return {"slot_mapping": None, "block_table": torch.tensor(entries)}


BAD = [
    ({"kvcaches": None}, "kvcaches: missing"),
    ({"slot_mapping": None}, "slot_mapping: missing"),
    ({"slot_mapping": torch.arange(15)}, "slot_mapping: 15 entries, not 16"),
    ({"slot_mapping": torch.arange(5, 21)}, "slot_mapping: entry 15 is 20, and kvcaches have 20 slots"),
    ({"slot_mapping": list(range(16))}, "slot_mapping: expected a tensor, got list"),
    ({"slot_mapping": torch.arange(16.0)}, "slot_mapping: expected int32 or int64"),
    ({"slot_mapping": torch.arange(16)[None]}, "slot_mapping: expected int32 or int64 of one dimension"),
    ({"block_table": torch.arange(4)}, "slot_mapping: pass it or block_table"),
    ({"block_size": 4}, "block_size: goes with block_table"),
    (tables([0, 1, 2]), "block_table: 3 entries, not 4"),
    (tables([0, 1, 5, 2]), "block_table: entry 2 is 5, and kvcaches have 5 blocks"),
    (tables([0, -1, 3, 2]), "block_table: entry 1 is -1"),
    (tables([0, 1, 2, 3]) | {"block_size": 6}, "block_size: expected a multiple of 4"),
    (tables([0, 1]) | {"block_size": 8} | {"block_table": torch.tensor([0, 2])}, "entry 1 is 2, and kvcaches have 2"),
    ({"pages": 1}, "pages: the paged connector takes"),
]


@pytest.mark.parametrize(("other", "message"), BAD, ids=[message for _, message in BAD])
def test_what_is_wrong_is_said(other: dict[str, Any], message: str) -> None:
    connector = PagedConnector(PagedConnector.Config(), SPEC)
    connector.check(given_where(), 16)
    connector.check(given_where(**tables([0, 1, 2, 3])), 16)
    with pytest.raises(ValueError, match=message):
        connector.check(given_where(**other), 16)


def test_tokens_without_a_slot_are_not_read_and_may_lie_before_what_is() -> None:
    connector = PagedConnector(PagedConnector.Config(), SPEC)
    slots = torch.tensor([8, 9, -1, 10, 11, 12, 13, 14, *range(8)])
    where = given_where(slot_mapping=slots)
    connector.check(where, 16)
    first, second = segments_of([8, 8], 0, 0)
    connector.read([second], [chunk_of(SPEC, 8, 0)], **where)
    with pytest.raises(ValueError, match="slot_mapping: a token of 0 to 8 has no slot"):
        connector.read([first, second], [chunk_of(SPEC, 8, 0), chunk_of(SPEC, 8, 0)], **where)
    with pytest.raises(ValueError, match="slot_mapping"):
        connector.read_layer(0, [first], [chunk_of(SPEC, 8, 0, layers=1)], **where)


@pytest.mark.parametrize(
    "chunk",
    [
        chunk_of(SPEC, 7, 0),
        chunk_of(SPEC, 8, 0, layers=1),
        chunk_of(KVSpec("m", 2, 2, 8, "float16"), 8, 0),
        Chunk(torch.zeros(2, 2, 16, 8, dtype=torch.bfloat16).transpose(2, 3), MemoryFormat.KV_BLOB, 8),
    ],
    ids=["short", "one layer", "float16", "strided"],
)
def test_a_chunk_of_the_wrong_shape_is_refused(chunk: Chunk) -> None:
    connector = PagedConnector(PagedConnector.Config(), SPEC)
    for move in (connector.read, connector.write):
        with pytest.raises(ValueError, match="chunk: of tokens 0 to 8"):
            move(segments_of([8], 0, 0), [chunk], **given_where())


def test_several_threads_move_every_plane_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    if (library := native.processor()) is None:
        pytest.skip("installed without its libraries, because there is no C++ compiler")
    spec = KVSpec("m", 5, 8, 128, "bfloat16")
    pages = pages_of(spec, "joined", "hnd", 40, 16, 3)
    layout = PagedLayout.of(pages.kvcaches, spec, "hnd")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    slots = torch.randperm(640, generator=torch.Generator().manual_seed(1))[:600].numpy()
    one, other = (torch.zeros(spec.blob_shape(600), dtype=torch.bfloat16) for _ in range(2))
    native.on_processor(native.Tables.of(Move(PageTable.of(layout), slots, [one], False)), library)
    by_torch(Move(PageTable.of(layout), slots, [other], False), layout)
    assert bits(one) == bits(other)


# -- layouts -----------------------------------------------------------------------------------------------------------


def layout_of(kvcaches: Any, name: str = "auto", spec: KVSpec = SPEC) -> PagedLayout:
    return PagedLayout.of(kvcaches, spec, name)  # type: ignore[arg-type]


def kv(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    "layer",
    [(kv(5, 4, 2, 8), kv(5, 4, 2, 8)), (kv(5, 2, 4, 8), kv(5, 2, 4, 8)), kv(2, 5, 4, 2, 8), kv(5, 2, 2, 4, 8),
     kv(5, 2, 4, 16), kv(5, 4, 2, 16), kv(5, 4, 2, 16).transpose(1, 2)],
    ids=lambda layer: "pair" if isinstance(layer, tuple) else str(list(layer.shape)),
)  # fmt: skip
def test_auto_knows_what_can_only_be_read_in_one_way(layer: Any) -> None:
    found = layout_of([layer, layer])
    assert (found.num_blocks, found.block_size) == (5, 4)
    assert [view.shape for layers in found.planes for view in layers] == [(5, 4, 2, 8)] * 4


REFUSED = [
    ("nonsense", "auto", "expected a list of layers, got str"),
    ([kv(5, 4, 2, 16)], "auto", "1 layers, the model has 2"),
    ([kv(5, 2, 2, 16)] * 2, "auto", "1 and 2 may both be heads; set layout to nhd or hnd"),
    ([kv(2, 2, 4, 2, 8)] * 2, "auto", "may be K and V of two blocks in either order"),
    ([kv(5, 4, 2, 8)] * 2, "auto", "is not K and V of heads of 8"),
    ([kv(5, 4, 2, 18)] * 2, "auto", "is not K and V of heads of 8"),
    ([kv(5, 4, 2, 16, dtype=torch.float16)] * 2, "auto", "float16, not torch.bfloat16"),
    ([(kv(5, 4, 3, 8), kv(5, 4, 3, 8))] * 2, "auto", "has 3 heads by auto, the model 2"),
    ([kv(5, 4, 2, 16)] * 2, "hnd", "has 4 heads by hnd, the model 2"),
    ([kv(5, 4, 2, 16), kv(6, 4, 2, 16)], "auto", r"kvcaches\[1\]: blocks of 6 x 4"),
    ([(kv(5, 4, 2, 8), kv(5, 4, 2, 8), kv(5, 4, 2, 8))] * 2, "auto", "expected 2 tensors, one for each plane"),
    ([kv(5, 4, 2, 16).transpose(1, 2)] * 2, "LBHNC", "are not those of LBHNC"),
    ([kv(5, 2, 4, 16)] * 2, "LBNHC", "are not those of LBNHC"),
    ([kv(5, 4, 16, 2).transpose(2, 3)] * 2, "nhd", "not contiguous"),
    (kv(2, 5, 4, 2, 16), "auto", "one tensor for all layers; set layout"),
    (kv(5, 4, 2, 16), "LBNHC", "expected the five dimensions of LBNHC"),
    ([kv(0, 4, 2, 16)] * 2, "auto", "has room for nothing"),
    ([None, kv(5, 4, 2, 16)], "auto", r"kvcaches\[0\]: expected a tensor, or a pair of them, got NoneType"),
]


@pytest.mark.parametrize(("kvcaches", "name", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_a_layout_that_does_not_fit_is_refused(kvcaches: Any, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_of(kvcaches, name)


def test_layers_that_are_not_there_yet_are_not_looked_at() -> None:
    connector = PagedConnector(PagedConnector.Config(), SPEC)
    where = given_where()
    where["kvcaches"] = [where["kvcaches"][0], None]
    connector.read_layer(0, segments_of([16], 0, 0), [chunk_of(SPEC, 16, 0, layers=1)], **where)
    with pytest.raises(ValueError, match=r"kvcaches\[1\]"):
        connector.read_layer(1, segments_of([16], 0, 0), [chunk_of(SPEC, 16, 0, layers=1)], **where)


def test_no_tensor_is_held_and_none_is_taken_for_another_at_its_place() -> None:
    connector = PagedConnector(PagedConnector.Config(), SPEC)
    generator = torch.Generator().manual_seed(0)
    layers = [torch.rand(10, 4, 2, 16, generator=generator).to(torch.bfloat16) for _ in range(2)]
    segments, slots = segments_of([20], 0, 0), torch.arange(20)
    for views in ([layer[:5] for layer in layers], [layer[::2] for layer in layers]):
        chunk = chunk_of(SPEC, 20, 0)
        connector.read(segments, [chunk], kvcaches=views, slot_mapping=slots)
        for number, view in enumerate(views):
            assert torch.equal(chunk.tensor[0, number], view[..., :8].flatten(0, 1).flatten(1))
    for others, message in (
        ([layer[:4] for layer in layers], "entry 19 is 19, and kvcaches have 16 slots"),
        ([layer[:5].view(torch.float16) for layer in layers], "float16, not torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            connector.check({"kvcaches": others, "slot_mapping": slots}, 20)
    gone = weakref.ref(layers[0])
    del layers, others, views, view
    gc.collect()
    assert gone() is None


def test_words_divide_every_address_and_stride() -> None:
    spec = KVSpec("m", 1, 2, 6, "uint8", kv_planes=1)
    room = torch.zeros(8192, dtype=torch.uint8)
    start = -room.data_ptr() % 64
    for pages_at, chunk_at, expected in ((0, 0, 4), (2, 0, 2), (1, 0, 1), (0, 2, 2), (4, 1, 1)):
        pages = room[start + pages_at :][: 4 * 4 * 12].view(4, 4, 2, 6)
        chunk = room[start + 4096 + chunk_at :][: 3 * 12].view(1, 1, 3, 12)
        table = PageTable.of(PagedLayout.of([pages], spec, "nhd"))
        assert native.word_of(native.Tables.of(Move(table, np.arange(3), [chunk], False)).bits) == expected


# -- in an engine ------------------------------------------------------------------------------------------------------


def test_layers_are_stored_as_they_come_and_retrieved_into_other_pages() -> None:
    spec, tokens = KVSpec("m", 3, 2, 8, "bfloat16"), torch.arange(64)
    source, target = (pages_of(spec, "joined", "LBNHC", 20, 4, seed) for seed in (1, 2))
    generator = torch.Generator().manual_seed(3)
    mine, theirs = (torch.randperm(80, generator=generator)[:64] for _ in range(2))
    config = {"connector": {"type": "paged", "layout": "LBNHC"}, "chunk_tokens": 16, "tiers": ["memory"]}
    with Engine.open(config, spec) as engine:
        some: list[Any] = [None] * 3
        with engine.store_layer(tokens, slot_mapping=mine) as storing:
            for layer in range(3):
                some[layer] = source.kvcaches[layer]
                storing.layer(layer, kvcaches=some)
            storing.finish()
        with engine.retrieve_layer(tokens, kvcaches=target.kvcaches, slot_mapping=theirs) as loading:
            assert all(loading.wait(layer).all() for layer in range(3))
    for ours, found in zip(source.planes, target.planes, strict=True):
        assert bits(ours.flatten(1, 2)[:, mine]) == bits(found.flatten(1, 2)[:, theirs])
