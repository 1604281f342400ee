"""The native chain of digests is the one that hashlib makes, whatever the tokens, and refuses what does not fit."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom import chain, keys, native

native_chain = keys._native_chain()
pytestmark = pytest.mark.skipif(native_chain is None, reason="no library, or a processor without SHA-256 instructions")

BEFORE = bytes(range(32))
tokens_of = st.integers(0, 1 << 30).map(np.random.default_rng)
"""Numbers of any sign and size."""


def expected(tokens: np.ndarray[Any, Any], chunk_tokens: int) -> list[bytes]:
    digest, found = BEFORE, []
    for start in range(0, len(tokens) - chunk_tokens + 1, chunk_tokens):
        digest = hashlib.sha256(digest + tokens[start : start + chunk_tokens].astype("<i4").tobytes()).digest()
        found.append(digest)
    return found


@given(
    rng=tokens_of,
    chunk_tokens=st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 257, 512, 600])),
    count=st.integers(0, 2500),
    dtype=st.sampled_from(["<i4", "<i8"]),
    batch=st.sampled_from([1, 60, 700, 1 << 18]),
)
def test_it_is_the_chain_that_hashlib_makes(
    rng: np.random.Generator, chunk_tokens: int, count: int, dtype: str, batch: int
) -> None:
    assert native_chain is not None
    tokens = rng.integers(-(2**31), 2**31, count).astype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "_BATCH_TOKENS", batch)
        for place in (keys._memory_of_array(tokens), keys._memory_of_tensor(torch.from_numpy(tokens))):
            assert place is not None or not count
            if place is not None:
                found = keys._native_digests(native_chain, place, BEFORE, chunk_tokens)
                assert found == expected(tokens, chunk_tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        torch.arange(200)[::2],
        torch.arange(100).view(10, 10),
        torch.arange(100, dtype=torch.int16),
        torch.arange(100.0),
        torch.arange(100, dtype=torch.float64),
        torch.frombuffer(bytearray(809), dtype=torch.int64, offset=1),
        torch.arange(100, device="meta"),
        torch.arange(100).to_sparse(),
        torch.tensor(1),
        list(range(100)),
    ],
)
def test_tokens_that_do_not_lie_flat_in_memory_have_no_place(tokens: Any) -> None:
    assert keys._memory_of_tensor(tokens) is None


@given(rng=tokens_of, count=st.integers(1, 600), batch=st.sampled_from([1, 1 << 18]), data=st.data())
def test_a_token_that_does_not_fit_is_refused_wherever_it_is(
    rng: np.random.Generator, count: int, batch: int, data: st.DataObject
) -> None:
    tokens = rng.integers(-(2**31), 2**31, count)
    tokens[data.draw(st.integers(0, count - 1))] = data.draw(st.sampled_from([2**31, -(2**31) - 1, 2**32, 2**63 - 1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "_BATCH_TOKENS", batch)
        with pytest.raises(ValueError, match=r"^tokens: a token id does not fit into 32 bits$"):
            chain(tokens, chunk_tokens=32, fingerprint="f")


@pytest.mark.parametrize(
    "tokens",
    [
        torch.arange(100),
        torch.arange(200)[::2],
        torch.arange(100, dtype=torch.int16),
        np.arange(100)[::-1],
        np.frombuffer(bytes(809), "<i8", 100, offset=9),
        np.arange(100).astype(">i8"),
        np.arange(100).astype("<u4"),
        np.arange(100.0),
        np.arange(100).reshape(10, 10),
        np.array(1),
    ],
)
def test_what_it_does_not_take_is_as_without_it(tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome() -> Any:
        try:
            return chain(tokens, chunk_tokens=8, fingerprint="f")
        except (TypeError, ValueError) as error:
            return repr(error)

    natively = outcome()
    monkeypatch.setattr(keys, "_native_chain", lambda: None)
    assert natively == outcome()


@pytest.mark.parametrize("chunk_tokens", [101, 2**64, 2**64 + 1, np.int64(8), True])
def test_chunks_of_any_size_are_as_without_it(chunk_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    natively = chain(np.arange(100), chunk_tokens=chunk_tokens, fingerprint="f")
    with pytest.raises(ValueError, match="32 bits"):
        chain(np.array([2**31]), chunk_tokens=chunk_tokens, fingerprint="f")
    monkeypatch.setattr(keys, "_native_chain", lambda: None)
    assert natively == chain(np.arange(100), chunk_tokens=chunk_tokens, fingerprint="f")


def test_a_processor_that_cannot_hashes_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cannot:
        def kvloom_has_chain(self) -> int:
            return 0

    monkeypatch.setattr(native, "own_library", lambda brief: Cannot())
    assert keys._native_chain.__wrapped__() is None
