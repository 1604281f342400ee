"""The memory for announcing removals has a bound, in chunks and in tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvloom import ChunkKey
from kvloom_connector_vllm.names import hash_of
from kvloom_connector_vllm.scheduling import announcing
from kvloom_connector_vllm.scheduling.announcing import Announcer
from kvloom_connector_vllm.scheduling.plan import Chunks


@pytest.mark.parametrize("bound", [{"_MOST_TOKENS": 8}, {"_MOST_CHUNKS": 2}])
def test_the_oldest_chunks_are_forgotten(monkeypatch: pytest.MonkeyPatch, bound: dict[str, int]) -> None:
    for name, most in bound.items():
        monkeypatch.setattr(announcing, name, most)
    announcer = Announcer(chunk_tokens=4, hash_tokens=2)
    hashes = [bytes([number]) for number in range(8)]
    request = SimpleNamespace(block_hashes=hashes, all_token_ids=list(range(16)), lora_request=None)
    keys = [ChunkKey("f/-", number, bytes([number]) * 32) for number in range(4)]
    for _ in range(2):
        for number, key in enumerate(keys):
            announcer.learn(request, Chunks(None, number, (hash_of(key),)))  # type: ignore[arg-type]
        announcer.left(keys, "CPU")
        told = [one.blocks for one in announcer.take() if one.blocks is not None]
        assert [list(blocks.tokens) for blocks in told] == [[8, 9, 10, 11], [12, 13, 14, 15]]
        assert [blocks.parent for blocks in told] == [hashes[3], hashes[5]]
