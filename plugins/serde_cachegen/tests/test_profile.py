"""Profiles: saved and loaded as they were, and nothing else is taken for one."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import profile_of, transform_of

from kvloom import KVSpec
from kvloom_serde_cachegen import profile as profiles
from kvloom_serde_cachegen.profile import (
    CorruptProfileError,
    Profile,
    Transform,
    quantised,
    rotations_of,
)


@settings(max_examples=20, deadline=None)
@given(planes=st.integers(1, 2), layers=st.integers(1, 3), blocks=st.integers(1, 3), klt=st.booleans())
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, planes: int, layers: int, blocks: int, klt: bool
) -> None:
    path = tmp_path_factory.mktemp("profile") / "it.safetensors"
    profile = profile_of(planes, layers, 32 * blocks, klt=klt)
    profile.save(path)
    loaded = Profile.load(path)
    assert loaded.to_bytes() == profile.to_bytes() == path.read_bytes()
    assert loaded.id == profile.id and loaded.verdicts == profile.verdicts
    assert torch.equal(loaded.weights, profile.weights)
    if profile.transform is not None and loaded.transform is not None:
        for plane in range(planes):
            assert loaded.transform.ranks(plane) == profile.transform.ranks(plane)
            for ours, theirs in zip(loaded.transform.bases[plane], profile.transform.bases[plane], strict=True):
                assert torch.equal(ours, theirs)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_file_with_a_wrong_byte_is_refused_or_means_the_same(tmp_path: Path) -> None:
    whole = profile_of(1, 1, 32).to_bytes()
    path = tmp_path / "wrong"
    for at in range(8 + int.from_bytes(whole[:8], "little") + 64):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with contextlib.suppress(CorruptProfileError):
            assert Profile.load(path).to_bytes() == whole


def test_a_file_that_is_cut_short_or_longer_is_refused(tmp_path: Path) -> None:
    whole = profile_of(1, 1, 32).to_bytes()
    path = tmp_path / "wrong"
    for length in (*range(0, len(whole), 7), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptProfileError, match=str(path)):
            Profile.load(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CorruptProfileError):
        Profile.load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ranks", torch.tensor([[-32, 96], [32, 32]], dtype=torch.int32)),
        ("ranks", torch.tensor([32, 96, 0], dtype=torch.int32)),
        ("ranks", torch.tensor([[2**31 - 1] * 2] * 2, dtype=torch.int32)),
        ("ranks", None),
        ("bases", torch.zeros(0)),
        ("bases", torch.tensor(0)),
        ("means", torch.tensor(0)),
        ("about", {"planes": "2"}),
        ("about", {"layers": 2.0}),
        ("about", {"interleaved": 1}),
        ("about", {"verdicts": {"step/0.75": {}}}),
        ("about", {"verdicts": []}),
        ("about", {"more": 1}),
        ("about", None),
    ],
)
def test_a_file_whose_checksum_is_right_may_be_wrong_all_the_same(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(CorruptProfileError, match=str(tmp_path)):
        Profile.load(changed(tmp_path, name, value))


def changed(folder: Path, name: str, value: Any) -> Path:
    """A profile with another tensor, or other words, and the right checksum."""
    path = folder / "wrong"
    whole = profile_of().to_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    about = json.loads(json.loads(header["__metadata__"]["kvloom"])["about"])
    tensors = safetensors.torch.load(whole)
    if name == "about":
        about = value and {**about, **value}
    else:
        tensors[name] = value
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    text = json.dumps(about)
    head = {"format": profiles.FORMAT, "about": text, "sha256": profiles._digest(text, tensors).hex()}
    path.write_bytes(safetensors.torch.save(tensors, {"kvloom": json.dumps(head)}))
    return path


def test_ranks_are_looked_at_before_there_is_a_tensor_for_each(tmp_path: Path) -> None:
    """They may be millions in a small file."""
    with pytest.raises(CorruptProfileError, match=r"ranks: torch\.int8 \(50000,\)"):
        Profile.load(changed(tmp_path, "ranks", torch.zeros(50_000, dtype=torch.int8)))
    many = changed(tmp_path, "ranks", torch.zeros(2, 2, dtype=torch.int32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles, "_MOST_RANKS", 3)
        with pytest.raises(CorruptProfileError, match="ranks: 4, more than 3"):
            Profile.load(many)


@pytest.mark.parametrize("wrong", [{"limits": {"kl": "small"}}, {"limits": {"kl": 10**400}}, {"kl": math.inf}], ids=str)
def test_figures_of_a_verdict_are_finite_numbers(tmp_path: Path, wrong: Any) -> None:
    (about,) = profile_of().verdicts.values()
    with pytest.raises(CorruptProfileError, match=r"limits|float|kl: inf"):
        Profile.load(changed(tmp_path, "about", {"verdicts": {"step/0.75": {**asdict(about), **wrong}}}))


@pytest.mark.parametrize("offsets", [[0, 4], [0, "4"], [0], None, [0, 1e400]])
def test_a_file_that_is_mostly_a_hole_is_not_read(tmp_path: Path, offsets: Any) -> None:
    header = json.dumps({"weights": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    file = tmp_path / "hole"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 1 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptProfileError, match="profile"):
            Profile.load(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_header_without_an_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "wrong"
    path.write_bytes((1 << 29).to_bytes(8, "little"))
    os.truncate(path, 1 << 30)
    with pytest.raises(CorruptProfileError, match="a header of more than 1048576 bytes"):
        Profile.load(path)


def test_a_full_disk_leaves_the_profile_of_before(
    tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    profile_of(1, 1, 32).save(tmp_path / "it")
    with full_disk(), pytest.raises(OSError, match="it"):
        profile_of(1, 2, 32).save(tmp_path / "it")
    assert Profile.load(tmp_path / "it").layers == 1


@pytest.mark.parametrize(
    "change",
    [
        {"weights": torch.zeros(2, 64)},
        {"weights": torch.ones(2, 64, dtype=torch.float64)},
        {"weights": torch.full((2, 64), float("nan"))},
        {"weights": torch.ones(64)},
        {"weights": torch.ones(3, 2, 64)},
        {"weights": torch.ones(2, 3, 64)},
        {"planes": 3},
        {"transform": transform_of(1, 2, 64)},
        {"transform": transform_of(2, 2, 96)},
        {"layers": 0},
        {"head_size": 24},
        {"rotary_size": 31},
        {"rotary_size": 34},
        {"rotations": torch.zeros(24, 16, 2)},
        {"rotations": torch.ones(24, 15, 2)},
        {"calibrated_tokens": -1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        profile_of(**change)


@pytest.mark.parametrize(
    "change",
    [
        {"means": torch.full((2, 2, 64), float("inf"))},
        {"scales": torch.zeros(2, 2, 64)},
        {"sigmas": torch.ones(2, 3)},
        {"sigmas": torch.zeros(2, 2)},
        {"bases": ((torch.zeros(32, 64, dtype=torch.int8),),) * 2},
        {"bases": ((torch.zeros(16, 64, dtype=torch.int8),) * 2,) * 2},
        {"bases": ((torch.zeros(32, 63, dtype=torch.int8),) * 2,) * 2},
        {"bases": ((torch.zeros(0, 64, dtype=torch.int8),) * 2,) * 2},
        {"bases": ((torch.zeros(32, 64),) * 2,) * 2},
        {"exponents": ((torch.full((32,), 6, dtype=torch.uint8),) * 2,) * 2},
        {"exponents": ((torch.zeros(31, dtype=torch.uint8),) * 2,) * 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_transform_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        replace(transform_of(2, 2, 64), **change)


def test_the_id_covers_what_decoding_depends_on_and_nothing_else() -> None:
    one = profile_of()
    assert replace(one, verdicts={}, model="other", weights=one.weights * 2).id == one.id
    assert one.transform is not None
    others = [
        replace(one, interleaved=True),
        replace(one, rotations=rotations_of(torch.zeros(16))),
        *(replace(one, transform=replace(one.transform, **change)) for change in (
            {"means": one.transform.means + 1},
            {"scales": one.transform.scales * 2},
            {"sigmas": one.transform.sigmas * 2},
            {"bases": tuple(tuple(-each for each in row) for row in one.transform.bases)},
            {"exponents": tuple(tuple(5 - each for each in row) for row in one.transform.exponents)},
        )),
    ]  # fmt: skip
    assert len({each.id for each in (one, *others)}) == 1 + len(others)


def test_the_id_of_a_profile_is_the_same_everywhere() -> None:
    transform = Transform(
        torch.arange(32.0).view(1, 1, 32), torch.ones(1, 1, 32), torch.ones(1, 1),
        ((torch.eye(32).mul(127).to(torch.int8),),), ((torch.zeros(32, dtype=torch.uint8),),),
    )  # fmt: skip
    profile = profile_of(1, 1, 32, rotary_size=0, rotations=torch.ones(24, 0, 2), transform=transform)
    assert profile.id.hex() == "0fd1179922b8b2935291661c782c68b1"


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(0, 10**6))
def test_bases_are_close_to_what_they_stand_for(blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.linalg.qr(torch.randn(32 * blocks, 32 * blocks, generator=generator, dtype=torch.float64)).Q
    bases, exponents = quantised(vectors)
    scale = 2.0 ** -exponents.double()[:, None] / 127
    assert bool(((bases * scale - vectors).abs() <= scale / 2 * (1 + 1e-9)).all())
    assert bool((bases.abs().amax(1) >= 63).all())


def test_rotations_are_those_of_powers_of_two() -> None:
    frequencies = torch.tensor([1.0, 0.1, 1e-4], dtype=torch.float64)
    rotations = rotations_of(frequencies).double()
    angles = 2.0**23 * frequencies
    assert torch.allclose(rotations[23], torch.stack([angles.cos(), angles.sin()], -1), atol=1e-7)
    assert torch.allclose(rotations[0, :, 1], frequencies.sin(), atol=1e-7)


def test_an_identity_does_not_say_what_computed_the_kv() -> None:
    def spec(revision: str, **more: Any) -> KVSpec:
        return KVSpec("Llama", 1, 1, 8, "bfloat16", revision=revision, **more)

    weights = "weights 12, config 34"
    assert spec(f"{weights}, on cpu: attention sdpa").identity == spec(f"{weights}, on cuda: eager").identity
    assert spec(weights).identity != spec("weights 13, config 34").identity
    assert spec(weights).identity != spec(weights, adapters=["lora 5"]).identity


def test_heads_of_another_size_are_another_profile() -> None:
    """Pairs are rotated within heads: who decodes with others gets other keys."""
    one = profile_of()
    assert replace(one, head_size=2 * one.head_size).id != one.id


@pytest.mark.parametrize("kind", ["fifo", "hole", "directory"])
def test_what_is_no_file_or_longer_than_any_profile_is_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "profile"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "hole":
        path.touch()
        os.truncate(path, 1 << 43)
    else:
        path.mkdir()
    with pytest.raises(CorruptProfileError, match="not a file"):
        Profile.load(path)
