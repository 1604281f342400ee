"""CacheBlend's interfaces: an executor, a retriever and what they return, under LMCache's names and kvloom's.

python examples/from_lmcache/blending.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import kvloom
import kvloom.contracts.blend
from kvloom import (
    BlendExecutor,
    BlendOutput,
    BlendRequest,
    BlendRetriever,
    BlendRetrieverResult,
    BlendRetrieverTask,
    BlendSession,
    Engine,
    KVSpec,
)
from kvloom_blend import (
    CacheBlendImpl,
    SPTBlendRetriever,
    SPTBlendRetrieverTask,
    create_index,
    executors,
    indices_to_mask,
    mask_to_indices,
    seed,
)
from kvloom_blend.retrievers.load_task import LoadTask
from kvloom_connector_transformers import RestoredKV

TOKENS, HIDDEN, SPT = 8, 16, 99


def layers(blend: Callable[..., BlendOutput], begin: torch.Tensor, valid: torch.Tensor) -> BlendOutput:
    """Layer 0 takes all tokens; layer 1 compares, and leaves out what is near enough."""
    where = torch.arange(TOKENS)
    retrieved, fresh = torch.randn(2, TOKENS, HIDDEN), torch.randn(3, TOKENS, HIDDEN)
    for number in (0, 1):
        output = blend(
            layer_id=number, retrieved_k=retrieved[0], retrieved_v=retrieved[1], valid_mask=valid,
            original_positions=where, fresh_q=fresh[0], fresh_k=fresh[1], fresh_v=fresh[2], positions=where,
            query_start_loc=begin, token_dim=0,
        )  # fmt: skip
    assert output.query_start_loc is not None and len(output.q) == len(output.positions) < TOKENS
    assert len(output.k) == len(output.v) == TOKENS
    kept = indices_to_mask(output.local_indices, TOKENS)
    assert set(mask_to_indices(~valid).tolist()) <= set(mask_to_indices(kept).tolist())
    assert torch.equal(fresh[0][create_index(2, 0, output.local_indices)], output.q)
    return output


def executor() -> None:
    begin, valid = torch.tensor([0, TOKENS]), torch.tensor([1, 1, 1, 1, 1, 1, 0, 0]).bool()
    old = CacheBlendImpl(recompute_ratio=0.5)
    old.set_positional_encoder(lambda positions, q, k: (q, k))  # models without RoPE turn nothing
    old.set_reverse_positional_encoder(lambda positions, q, k: (q, k))
    layers(old.blend, begin, valid)
    new: BlendExecutor = executors.CacheBlendExecutor(executors.CacheBlendExecutor.Config(recompute_ratio=0.5))
    session: BlendSession = new.begin(BlendRequest(torch.zeros(TOKENS, dtype=torch.long), begin, valid))
    layers(session.blend, begin, valid)
    assert seed.CacheBlendImpl is CacheBlendImpl and kvloom.contracts.blend.BlendSession is BlendSession


def retriever() -> None:
    spec = KVSpec("example", num_layers=2, num_kv_heads=2, head_size=8, dtype="float32")
    tiers = [{"type": "memory", "capacity": "64MiB"}]
    with Engine.open({"connector": "transformers", "chunk_tokens": 16, "tiers": tiers}, spec) as engine:
        finder: BlendRetriever = SPTBlendRetriever(spt=torch.tensor(SPT), cache_engine=engine, metadata=spec)
        passage = torch.tensor([1, 2, 3, SPT])
        keys, values = ([torch.rand(1, 2, 4, 8) for _ in range(2)] for _ in range(2))
        engine.save(finder.alone(passage), cache=RestoredKV(keys, values)).result()

        prompt = torch.tensor([7, 7, SPT, *passage.tolist(), 5])
        task: BlendRetrieverTask = finder.new_request(
            input_tokens=prompt, query_start_loc=torch.tensor([0, len(prompt)])
        )
        assert isinstance(task, SPTBlendRetrieverTask) and issubclass(SPTBlendRetrieverTask, LoadTask)
        result: BlendRetrieverResult = task.result(layer_id=1)
        assert result.k is not None and result.v is not None
        assert result.valid_mask.tolist() == [False] * 3 + [True] * 4 + [False]
        assert result.original_positions[result.valid_mask].tolist() == [0, 1, 2, 3]
        task = LoadTask(engine, segments=[], num_tokens=4, device=torch.device("cpu"))  # begins its loads itself
        assert not task.result(0).valid_mask.any()
    print("executor and retriever: ok;", sorted(kvloom.Registry.discover().types("blend retriever")))


if __name__ == "__main__":
    torch.manual_seed(0)
    executor()
    retriever()
