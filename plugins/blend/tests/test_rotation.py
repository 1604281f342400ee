"""K that is turned from one position to another is what it would have been there; torch, and the libraries bit for bit.

The kernel runs on a GPU where there is one, else as a loop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom_blend.rotation import Rotation, Rotations, Turn, native

CSRC = Path(__file__).parents[1] / "csrc"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MOST = 131_071


@st.composite
def rotations(draw: st.DrawFn) -> Rotation:
    """Whole heads and parts of them, in halves and interleaved, at the beginning of a head and later."""
    pairs = draw(st.integers(1, 40))
    theta = draw(st.sampled_from([1e4, 5e5, 1e6]))
    inv_freq = 1.0 / (theta ** (torch.arange(pairs) / pairs)) / draw(st.sampled_from([1.0, 4.0]))
    start = draw(st.sampled_from([0, 0, 8, 3]))
    head_size = start + 2 * pairs + draw(st.sampled_from([0, 0, 16, 5]))
    return Rotation(inv_freq, head_size=head_size, interleaved=draw(st.booleans()), start=start)


def rows(tokens: int, hidden: int, *, dtype: torch.dtype, apart: int, seed: int) -> torch.Tensor:
    """K of N(0, 1) `[tokens, hidden]`, its tokens `apart` elements further from each other than they need be."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, hidden + apart, generator=generator).to(dtype)[:, :hidden]


def computed(k: torch.Tensor, positions: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """A model's rotation of K without positions, float64: angles are rounded to float32, and the rest is exact."""
    turned, pairs = k.double().unflatten(-1, (-1, rotation.head_size)).clone(), rotation.pairs
    dims = torch.arange(2 * pairs).view(-1, 2) if rotation.interleaved else torch.arange(2 * pairs).view(2, -1).T
    first, second = (rotation.start + dims).unbind(1)
    angles = (positions.float()[:, None] * rotation.inv_freq).double()
    numbers = (
        torch.complex(turned[..., first], turned[..., second]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    turned[..., first], turned[..., second] = numbers.real, numbers.imag
    return turned.flatten(1)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also of zeros; two that are not numbers are alike."""
    numbers = one == one
    integer: Any = {2: torch.int16, 4: torch.int32}[one.element_size()]
    alike = one.contiguous().view(integer) == other.contiguous().view(integer)
    return bool(((alike & numbers) | (~numbers & (other != other))).all())


few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 0.05, torch.float16: 0.01}
positions = st.integers(0, MOST)
LLAMA = Rotation(1.0 / (1e4 ** (torch.arange(32) / 32)), head_size=64)


@few
@given(
    rotation=rotations(), dtype=st.sampled_from(list(BOUNDS)), old=positions, new=positions, tokens=st.integers(1, 40),
    heads=st.integers(1, 4), apart=st.sampled_from([0, 8, 3]), where=st.sampled_from(["new", "out", "itself"]),
    contiguous=st.booleans(), seed=st.integers(0, 1 << 20),
)  # fmt: skip
def test_it_is_what_it_would_have_been_there(
    rotation: Rotation, dtype: torch.dtype, old: int, new: int, tokens: int, heads: int, apart: int, where: str,
    contiguous: bool, seed: int,
) -> None:  # fmt: skip
    """Moved as a whole and scattered; into a new tensor, another one, or where it is."""
    plain = rows(tokens, heads * rotation.head_size, dtype=torch.float32, apart=0, seed=seed)
    step = torch.arange(tokens) if contiguous else torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    before, after = (old + torch.arange(tokens)).clamp(max=MOST), (new + step).clamp(max=MOST)
    k = rows(tokens, plain.shape[1], dtype=dtype, apart=apart, seed=0)
    k.copy_(computed(plain, before, rotation))
    kept = k.clone()
    out = {"new": None, "out": rows(*k.shape, dtype=dtype, apart=5, seed=1), "itself": k}[where]
    turned = rotation.apply(k, rotation.turn(before, after), out=out)
    assert out is None or turned is out
    assert turned.dtype == dtype
    assert (turned.double() - computed(plain, after, rotation)).abs().max() <= BOUNDS[dtype]
    assert where == "itself" or same_bits(k, kept)
    untouched = torch.ones(rotation.head_size, dtype=torch.bool)
    untouched[rotation.start : rotation.start + 2 * rotation.pairs] = False
    rest = [each.unflatten(1, (heads, -1))[..., untouched] for each in (turned, kept)]
    assert same_bits(*rest)


@few
@given(rotation=rotations(), places=st.tuples(positions, positions, positions), seed=st.integers(0, 1 << 20))
def test_two_moves_are_as_good_as_one(rotation: Rotation, places: tuple[int, int, int], seed: int) -> None:
    k = rows(3, 2 * rotation.head_size, dtype=torch.float32, apart=0, seed=seed)
    first, second, third = (torch.full((3,), place) for place in places)
    by_way = rotation.apply(rotation.apply(k, rotation.turn(first, second)), rotation.turn(second, third))
    assert (by_way - rotation.apply(k, rotation.turn(first, third))).abs().max() <= 4e-6


def test_what_stays_where_it_is_keeps_its_bits() -> None:
    k, there = rows(5, 128, dtype=torch.bfloat16, apart=0, seed=0), torch.arange(5) + 99_999
    assert same_bits(LLAMA.apply(k, LLAMA.turn(there, there)), k)


def test_between_tokens_of_out_nothing_is_written() -> None:
    whole = torch.full((6, 150), 7.0)
    k, there = rows(6, 128, dtype=torch.float32, apart=0, seed=0), torch.arange(6)
    LLAMA.apply(k, LLAMA.turn(there, there + 5), out=whole[:, 10:138])
    assert (whole[:, :10] == 7).all() and (whole[:, 138:] == 7).all()
    assert same_bits(whole[:, 10:138], LLAMA.apply(k, LLAMA.turn(there, there + 5)))


def test_sections_of_mrope_turn_by_positions_of_their_own() -> None:
    sections = torch.tensor([0, 1, 2] * 10 + [0, 0])
    rotation = Rotation(LLAMA.inv_freq, head_size=64, sections=sections)
    old = torch.stack([torch.arange(4), torch.arange(4) // 2, torch.arange(4) % 2])
    new = old + torch.tensor([[900], [50], [7]])
    k = rows(4, 128, dtype=torch.float32, apart=0, seed=0)
    turned = rotation.halves(rotation.apply(k, rotation.turn(old, new)))
    for section in range(3):
        alone = LLAMA.halves(LLAMA.apply(k, LLAMA.turn(old[section], new[section])))
        for one, other in zip(turned, alone, strict=True):
            assert same_bits(one[..., sections == section], other[..., sections == section])


def test_text_in_sections_turns_as_text() -> None:
    """Equal in all sections, with a rope that has sections and with one that has none."""
    old, new = torch.arange(4), torch.arange(4) + 1000
    sectioned = Rotation(LLAMA.inv_freq, head_size=64, sections=torch.arange(32) % 3)
    expected = LLAMA.turn(old, new)
    for rotation in (LLAMA, sectioned):
        for turn in (rotation.turn(old.expand(3, -1), new.expand(3, -1)), rotation.turn(old, new)):
            assert torch.equal(turn.cos, expected.cos) and torch.equal(turn.sin, expected.sin)
    with pytest.raises(ValueError, match="differ between sections"):
        LLAMA.turn(torch.stack([old, old + 1]), torch.stack([new, new + 1]))


def test_layers_share_what_is_equal() -> None:
    again = Rotation(LLAMA.inv_freq.clone(), head_size=64)
    other = Rotation(LLAMA.inv_freq, head_size=64, interleaved=True)
    model = Rotations([LLAMA, None, again, other])
    assert len(model) == 4 and model[1] is None and model[2] is model[0] and model[3] is not model[0]
    sectioned = Rotation(LLAMA.inv_freq, head_size=64, sections=torch.arange(32) % 3)
    assert Rotations([LLAMA, sectioned])[1] is sectioned
    turns = model.turns(torch.arange(3), torch.arange(3) + 8)
    assert turns[1] is None and turns[2] is turns[0] and turns[3] is not turns[0]
    ks = [rows(3, 128, dtype=torch.float32, apart=0, seed=seed) for seed in range(4)]
    outs = model.apply(ks, turns)
    assert same_bits(outs[1], ks[1]) and outs[1] is not ks[1]
    for number in (0, 2, 3):
        turn, rotation = turns[number], model[number]
        assert turn is not None and rotation is not None
        assert same_bits(outs[number], rotation.apply(ks[number], turn))
    assert all(one is other for one, other in zip(model.apply(ks, turns, outs=ks), ks, strict=True))
    assert all(same_bits(one, other) for one, other in zip(ks, outs, strict=True))


def test_a_rotation_does_not_change() -> None:
    own = torch.ones(4)
    rotation = Rotation(own, head_size=8)
    own.fill_(2)
    assert (rotation.inv_freq == 1).all()
    with pytest.raises(AttributeError, match="start"):
        rotation.start = 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"inv_freq": torch.ones(2, 2)}, "inv_freq"),
        ({"inv_freq": torch.tensor([1.0, torch.nan])}, "finite"),
        ({"head_size": 6}, "start: 4 pairs from dimension 0"),
        ({"start": 1}, "start: 4 pairs from dimension 1"),
        ({"start": -1}, "start"),
        ({"sections": torch.tensor([0, 1])}, "sections"),
    ],
)
def test_a_rope_that_does_not_fit_a_head_is_refused(wrong: dict[str, object], says: str) -> None:
    settings_ = {"inv_freq": torch.ones(4), "head_size": 8, **wrong}
    with pytest.raises(ValueError, match=says):
        Rotation(settings_.pop("inv_freq"), **settings_)  # type: ignore[arg-type]


def test_k_that_does_not_fit_is_refused() -> None:
    there = torch.arange(4)
    turn, k = LLAMA.turn(there, there + 1), torch.zeros(4, 128)
    whole = torch.zeros(8, 128)
    for named, call in {
        "new": lambda: LLAMA.turn(there, there[:3]),
        "positions": lambda: LLAMA.turn(there.float(), there.float()),
        "k": lambda: LLAMA.apply(torch.zeros(4, 100), turn),
        "k: ": lambda: LLAMA.apply(k.long(), turn),
        "turn.cos": lambda: LLAMA.apply(torch.zeros(5, 128), turn),
        "turn.sin": lambda: LLAMA.apply(k, Turn(turn.cos, turn.sin.double())),
        "out": lambda: LLAMA.apply(k, turn, out=torch.zeros(4, 64)),
        "out: ": lambda: LLAMA.apply(k, turn, out=k.half()),
        "out: lies": lambda: LLAMA.apply(whole[:4], turn, out=whole[::2]),
        "ks": lambda: LLAMA.apply_layers([k, torch.zeros(4, 64)], turn),
    }.items():
        with pytest.raises(ValueError, match=f"^{named}"):
            call()
    assert len(LLAMA.apply(torch.zeros(0, 128), LLAMA.turn(there[:0], there[:0]))) == 0


# -- the libraries ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def emulated(for_a_processor: Callable[..., Path]) -> native.Kernels:
    if (kernels := native.kernels()) is not None:
        return kernels
    built = for_a_processor(CSRC / "rotate.cu", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off")
    return native.Kernels(ctypes.CDLL(str(built)), "cpu")


@pytest.fixture(params=["best", "portable", "kernel"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One after the other is what `native.rotate` finds; where K is for it."""
    monkeypatch.setattr(native, "_BYTES_OF_A_THREAD", 1)
    monkeypatch.setattr(native, "kernels", lambda: None)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    if request.param == "kernel":
        kernels: native.Kernels = request.getfixturevalue("emulated")
        monkeypatch.setattr(native, "kernels", lambda: kernels)
        yield kernels.device_type
    else:
        library = native.processor() or pytest.skip("installed without its library")
        if request.param == "portable":
            portable = SimpleNamespace(kvr_rotate=lambda call, threads, _: library.kvr_rotate(call, threads, 1))
            monkeypatch.setattr(native, "processor", lambda: portable)
        yield "cpu"
    torch.set_num_threads(before)


def by_torch(rotation: Rotation, turn: Turn, ks: list[torch.Tensor]) -> list[torch.Tensor]:
    return [rotation.by_torch(k, turn) for k in ks]


def on(device: str, turn: Turn) -> Turn:
    return Turn(*(table.to(device) for table in turn))


@few
@given(
    rotation=rotations(), dtype=st.sampled_from(DTYPES), layers=st.sampled_from([1, 2, 3, 97, 200]),
    tokens=st.integers(1, 60), heads=st.integers(1, 5), apart=st.sampled_from([0, 8, 4, 3]),
    further=st.sampled_from([0, 8, 5]), itself=st.booleans(), scale=st.sampled_from([1.0, 3e4, 1e-5, 1e-7]),
    old=st.integers(0, MOST), new=st.integers(0, MOST), seed=st.integers(0, 1 << 20),
)  # fmt: skip
def test_it_turns_as_torch_does(
    device: str, rotation: Rotation, dtype: torch.dtype, layers: int, tokens: int, heads: int, apart: int, further: int,
    itself: bool, scale: float, old: int, new: int, seed: int,
) -> None:  # fmt: skip
    """Words of every width, more layers than a launch takes, and values to the largest and the smallest there are."""
    hidden, step = heads * rotation.head_size, torch.arange(tokens)
    tokens = tokens if layers < 4 else min(tokens, 3)
    turn = rotation.turn(old + step[:tokens], new + step[:tokens])
    ks = [scale * rows(tokens, hidden, dtype=dtype, apart=apart, seed=seed + layer) for layer in range(layers)]
    expected, there = by_torch(rotation, turn, ks), [k.to(device) for k in ks]
    whole = [torch.full((tokens, hidden + further), 7, dtype=dtype, device=device) for _ in ks]
    outs = there if itself else [each[:, :hidden] for each in whole]
    assert native.rotate(rotation, on(device, turn), there, outs)
    assert all(same_bits(out.cpu(), right) for out, right in zip(outs, expected, strict=True))
    if not itself:
        assert all(same_bits(k.cpu(), kept) for k, kept in zip(there, ks, strict=True))
        assert all((each[:, hidden:] == 7).all() for each in whole)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_number_of_two_bytes_is_read_and_rounded_as_torch_does(
    device: str, dtype: torch.dtype, interleaved: bool
) -> None:
    """All 65,536, in each of several rotations; those next to infinity and to zero, and what is not a number."""
    rotation = Rotation(torch.ones(256), head_size=512, interleaved=interleaved)
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)[torch.randperm(1 << 16)].view(128, 512)
    angles = torch.linspace(0, 7, 128 * 256).view(128, 256)
    angles[:16] = 0
    turn = Turn(angles.cos(), angles.sin())
    turned = torch.empty_like(every, device=device)
    assert native.rotate(rotation, on(device, turn), [every.to(device)], [turned])
    assert same_bits(turned.cpu(), rotation.by_torch(every, turn))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_halfway_is_rounded_to_the_even_one(device: str, dtype: torch.dtype) -> None:
    rotation = Rotation(torch.ones(8), head_size=16)
    ulp = torch.finfo(dtype).eps
    turn = Turn(torch.tensor([[1 + ulp / 2, 1 + 3 * ulp / 2] * 4]), torch.zeros(1, 8))
    turned = torch.empty(1, 16, dtype=dtype, device=device)
    assert native.rotate(rotation, on(device, turn), [torch.ones_like(turned)], [turned])
    assert turned.tolist() == [[1.0, 1 + 2 * ulp] * 8]


def test_the_widest_word_that_fits_is_taken() -> None:
    def wide(dims: tuple[int, int, int], size: int, *row: int, tables: int = 0) -> int:
        head_size, pairs, start = dims
        rotation = Rotation(torch.ones(pairs), head_size=head_size, start=start)
        return native.width(rotation, native.np.array([row]), size, tables)

    assert wide((128, 64, 0), 2, 1 << 12, 1 << 13, 256, 256) == 8
    assert wide((128, 64, 0), 4, 1 << 12, 1 << 13, 512, 512) == 4
    assert wide((128, 64, 0), 2, 1 << 12, (1 << 13) + 2, 256, 256) == 1
    assert wide((128, 64, 0), 2, 1 << 12, 1 << 13, 256, 260) == 2
    assert wide((128, 64, 0), 2, 1 << 12, 1 << 13, 256, 256, tables=(1 << 9) + 16) == 4
    assert wide((80, 20, 0), 2, 1 << 12, 1 << 13, 256, 256) == 4
    assert wide((580, 32, 514), 2, 1 << 12, 1 << 13, 256, 256) == 2


@pytest.mark.parametrize(
    "k",
    [torch.zeros(4, 16, dtype=torch.float64), torch.zeros(16, 4).T, torch.zeros(0, 16)],
    ids=["float64", "columns", "nothing"],
)
def test_what_the_libraries_cannot_take_is_left_to_torch(k: torch.Tensor) -> None:
    rotation = Rotation(torch.ones(8), head_size=16)
    turn = rotation.turn(torch.arange(len(k)), torch.arange(len(k)) + 1)
    assert not native.rotate(rotation, turn, [k], [k])
    assert same_shape(rotation.apply(k, turn), k)


def same_shape(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def test_numbers_that_make_no_sense_are_refused(emulated: native.Kernels) -> None:
    """The library checks only numbers, whatever Python has verified before."""
    fits = {"tokens": 1, "count": 1, "dtype": 0, "heads": 1, "head_size": 16, "start": 0, "pairs": 8, "interleaved": 0}
    calls: list[Callable[[Any], int]] = [lambda call: emulated.library.kvr_cuda_rotate(ctypes.byref(call), 1, 1, None)]
    if library := native.processor():
        calls.append(lambda call: library.kvr_rotate(ctypes.byref(call), 1, 0))
    for wrong in (
        {"tokens": 0}, {"count": 0}, {"dtype": 3}, {"dtype": -1}, {"heads": 0}, {"pairs": 0}, {"pairs": 9},
        {"start": 1}, {"start": -1}, {"head_size": 15},
    ):  # fmt: skip
        for call in calls:
            assert call(native._Rotate(**{**fits, **wrong})) == 1, wrong
    for width, blocks in ((8, 1), (3, 1), (0, 1), (1, 0)):
        assert emulated.library.kvr_cuda_rotate(ctypes.byref(native._Rotate(**fits)), width, blocks, None) == 1
