"""Keys: the same everywhere and for ever, and different whenever KV may not be shared."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom import ChunkKey, KVSpec, MemoryFormat, Segment, chain, leading, pieces, select
from kvloom.keys import fingerprint, salt_tag

SPEC = KVSpec(model="m", revision="r", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16")
FINGERPRINT = "d0d656e4debd29ed4808cc2f8b80d9ca"
GOLDEN = {
    "fingerprint": FINGERPRINT,
    "first": FINGERPRINT + "/-/0-9054fe6c40ad6d40c0a034e3cb7a35417a296b5aa033534f4da908fd5d83d5d4",
    "last": FINGERPRINT + "/-/3-a6abc336df4645135d0e3a575862f9d69c488751f03adb72dd2e5fb96afb33e6",
    "salted": FINGERPRINT + "/ee9d86f2297bb018/0-c2734cf06786ba9e84ee67838ebb1d56e3515b31519263a8094159ae8b717eba",
    "first piece": FINGERPRINT + "/ee9d86f2297bb018/0-ef5c0875bbb518d13b72e6b8c3d5f0c25e1d1a54b3d939d53a4cf1814f03bc76",
    "last piece": FINGERPRINT + "/ee9d86f2297bb018/2-2120bf9f12b7f9ed7c8928110094f37530b42b4b8d3d3e20e46bcb7bed9c0fe0",
}


def _vectors() -> dict[str, str]:
    name = fingerprint(SPEC, MemoryFormat.KV_BLOB, {"a": [1, "x"]})
    tokens = torch.arange(1000, 1034, dtype=torch.int64)
    plain = chain(tokens, chunk_tokens=8, fingerprint=name)
    salted = chain(tokens, chunk_tokens=8, fingerprint=name, salt="tenant é")
    about: dict[str, Any] = {"chunk_tokens": 64, "fingerprint": name, "salt": "tenant é"}
    first, *_ = pieces(tokens, None, **about)
    *_, last = pieces(torch.arange(128), chain(torch.arange(64), **about)[0], **about)
    return {
        "fingerprint": name,
        "first": str(plain[0].key),
        "last": str(plain[-1].key),
        "salted": str(salted[0].key),
        "first piece": str(first.key),
        "last piece": str(last.key),
    }


def test_golden_vectors() -> None:
    assert _vectors() == GOLDEN


@pytest.mark.slow  # every run of these tests has another one, but for where it is set
@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_golden_vectors_in_another_process_with_another_hash_seed(seed: str) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_keys; print(test_keys._vectors())"
    here = os.path.dirname(__file__)
    env = {**os.environ, "PYTHONHASHSEED": seed}
    out = subprocess.run([sys.executable, "-c", code, here], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str(GOLDEN)


def test_a_reference_written_from_the_definition_agrees() -> None:
    import struct

    digest = hashlib.sha256(b"kvloom/1\0fp\x004\0salt").digest()
    for index, segment in enumerate(
        chain(torch.arange(14, dtype=torch.int16), chunk_tokens=4, fingerprint="fp", salt="salt")
    ):
        digest = hashlib.sha256(digest + struct.pack("<4i", *range(4 * index, 4 * index + 4))).digest()
        assert segment == (4 * index, 4 * index + 4, (f"fp/{salt_tag('salt')}", index, digest))


@given(
    tokens=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=70),
    chunk=st.integers(1, 9),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_segments_tile_the_tokens_and_a_key_covers_every_token_before(
    tokens: list[int], chunk: int, dtype: torch.dtype
) -> None:
    segments = chain(torch.tensor(tokens, dtype=dtype), chunk_tokens=chunk, fingerprint="fp")
    assert [(s.start, s.end) for s in segments] == [(i * chunk, (i + 1) * chunk) for i in range(len(tokens) // chunk)]
    for segment in segments:
        assert ChunkKey.parse(str(segment.key)) == segment.key
    if tokens:
        changed = [*tokens]
        changed[0] ^= 1
        other = chain(torch.tensor(changed, dtype=dtype), chunk_tokens=chunk, fingerprint="fp")
        assert not {s.key for s in segments} & {s.key for s in other}


@given(one=st.text(max_size=8), two=st.text(max_size=8))
def test_two_salts_share_nothing(one: str, two: str) -> None:
    tokens = torch.arange(8)
    keys = [{s.key for s in chain(tokens, chunk_tokens=2, fingerprint="fp", salt=salt)} for salt in (one, two)]
    digests = [{key.digest for key in some} for some in keys]
    if one == two:
        assert keys[0] == keys[1]
    else:
        assert not digests[0] & digests[1] and salt_tag(one) != salt_tag(two)


@pytest.mark.parametrize("salt", [None, 7, b"tenant"])
def test_a_salt_that_is_not_text_is_refused_by_name(salt: object) -> None:
    with pytest.raises(TypeError, match=f"^salt: expected a str, got {type(salt).__name__}$"):
        chain(torch.arange(4), chunk_tokens=2, fingerprint="f", salt=salt)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk_tokens", [0, -1])
def test_chunks_of_no_tokens_are_refused(chunk_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"^chunk_tokens: expected at least 1, got {chunk_tokens}$"):
        chain(torch.arange(4), chunk_tokens=chunk_tokens, fingerprint="f")


def test_a_salt_that_is_no_unicode_is_a_salt_as_any_other() -> None:
    salts = ["", "\udc80", "\udc81", "\ufffd", "?", "\\udc80"]
    keys = [chain(torch.arange(4), chunk_tokens=4, fingerprint="f", salt=salt)[0].key for salt in salts]
    assert len({key.digest for key in keys}) == len({key.namespace for key in keys}) == len(salts)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"}, {"revision": "s"}, {"num_layers": 3}, {"num_kv_heads": 1}, {"head_size": 8},
        {"dtype": "float16"}, {"rope": {"theta": 1e6}}, {"adapters": ["lora:ab"]}, {"kv_planes": 1},
        {"kv_quantization": "fp8"}, {"world_size": 2}, {"world_size": 2, "rank": 1},
    ],
)  # fmt: skip
def test_every_field_of_the_spec_reaches_the_fingerprint(change: dict[str, object]) -> None:
    from dataclasses import replace

    other = replace(SPEC, **change)
    assert fingerprint(other, MemoryFormat.KV_BLOB, {}) != fingerprint(SPEC, MemoryFormat.KV_BLOB, {})


def test_format_and_representation_reach_the_fingerprint_and_rank_does_not_where_replicated() -> None:
    names = {
        fingerprint(SPEC, MemoryFormat.KV_BLOB, {}),
        fingerprint(SPEC, MemoryFormat.KV_PAGES, {}),
        fingerprint(SPEC, MemoryFormat.KV_BLOB, {"block": 16}),
    }
    assert len(names) == 3
    from dataclasses import replace

    ranks = [replace(SPEC, world_size=2, rank=rank, replicated=True) for rank in (0, 1)]
    assert len({fingerprint(one, MemoryFormat.KV_BLOB, {}) for one in ranks}) == 1


def test_chunk_size_is_part_of_the_key() -> None:
    tokens = torch.arange(8)
    whole = {s.key.digest for s in chain(tokens, chunk_tokens=8, fingerprint="f")}
    assert not whole & {s.key.digest for s in chain(tokens, chunk_tokens=4, fingerprint="f")}


@pytest.mark.parametrize(
    ("tokens", "error", "says"),
    [
        ([1, 2], TypeError, "torch.Tensor"),
        (torch.tensor([1.0]), TypeError, "integer dtype"),
        (torch.tensor([True]), TypeError, "integer dtype"),
        (torch.zeros(2, 2, dtype=torch.int64), ValueError, "1 dimension"),
        (torch.tensor([2**31]), ValueError, "32 bits"),
        (torch.empty(4, dtype=torch.int64, device="meta"), ValueError, "CPU"),
    ],
)
def test_tokens_of_the_wrong_kind_are_refused_by_name(tokens: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"tokens: .*{says}"):
        chain(tokens, chunk_tokens=2, fingerprint="f")  # type: ignore[arg-type]


@given(total=st.integers(0, 40), skipped=st.integers(0, 40), chunk=st.integers(1, 7))
def test_masks(total: int, skipped: int, chunk: int) -> None:
    skipped = min(skipped, total)
    segments = chain(torch.arange(total), chunk_tokens=chunk, fingerprint="f")
    mask = torch.arange(total) >= skipped
    covered = total // chunk * chunk
    if skipped == total:
        assert select(segments, mask, total) == len(segments)
    elif skipped % chunk or skipped > covered:
        with pytest.raises(ValueError, match="whole number of chunks"):
            select(segments, mask, total)
    else:
        assert select(segments, mask, total) == skipped // chunk


@pytest.mark.parametrize(
    ("mask", "error", "says"),
    [
        (torch.tensor([True, False, True, True]), ValueError, "before its Trues"),
        (torch.tensor([True, True, False, False]), ValueError, "before its Trues"),
        (torch.ones(5, dtype=torch.bool), ValueError, "shape"),
        (torch.ones(4), TypeError, "bool"),
    ],
)
def test_masks_that_are_no_prefix_masks_are_refused(mask: torch.Tensor, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"mask: .*{says}"):
        select(chain(torch.arange(4), chunk_tokens=2, fingerprint="f"), mask, 4)


def test_a_reference_of_pieces_written_from_the_definition_agrees() -> None:
    """Units of 16 tokens for chunks of up to 256, of 32 for up to 512, and so on."""
    for chunk, unit in ((16, 16), (40, 16), (256, 16), (257, 32), (600, 48)):
        tokens = torch.arange(3 * chunk + unit * 2 + 5, dtype=torch.int32)
        about: dict[str, Any] = {"chunk_tokens": chunk, "fingerprint": "fp", "salt": "salt"}
        whole = chain(tokens, **about)
        for number in range(4):
            before = whole[number - 1].key.digest if number else _root(chunk)
            first, found = number * chunk, []
            for count in range(1, (min(chunk - 1, len(tokens) - first)) // unit + 1):
                low = count & -count
                start, end = first + (count - low) * unit, first + count * unit
                text = b"kvloom/1/piece\0" + before + tokens[first:end].numpy().tobytes() + start.to_bytes(8, "little")
                depth = number + bin(count).count("1") - 1
                found.append((start, end, (f"fp/{salt_tag('salt')}", depth, hashlib.sha256(text).digest())))
            last = whole[number - 1] if number else None
            assert pieces(tokens, last, **about) == found
            own = pieces(tokens, last, own=True, **about)
            assert own == leading(found_segments(found), first), "those that lead to the last unit"


def found_segments(found: list[Any]) -> list[Segment]:
    return [Segment(start, end, ChunkKey(*key)) for start, end, key in found]


def _root(chunk: int) -> bytes:
    return hashlib.sha256(f"kvloom/1\0fp\0{chunk}\0salt".encode()).digest()
