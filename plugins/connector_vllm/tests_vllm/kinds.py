"""The kinds of models that `KVLoomConnector` serves or refuses: what the tests here run, and the table in
docs/use/vllm.md, which `python scripts/docs/models.py` makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Model:
    """A tiny random model whose hits answer as vLLM's own prefix cache, shown by the test named."""

    name: str
    """A fixture of conftest.py, or one of make_model.KINDS."""
    words: str
    test: str
    """File and test function: `test_windows.py::test_...`."""
    also: Mapping[str, str] = field(default_factory=dict)
    """More that was shown with this model: in words, and the test."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of `LLM` without which it does not run on a processor."""
    needs: str = ""
    """A feature of the processor."""
    note: str = ""


@dataclass(frozen=True)
class Kind:
    """A row of the table."""

    layers: str
    served: str = "yes"
    models: tuple[Model, ...] = ()
    not_run: str = ""
    """The reason that there are no models."""


WINDOWS = "test_windows.py::test_hits_from_memory_and_from_disk_answer_as_the_engines_own_prefix_cache"
STATES = "test_states.py::test_hits_answer_as_the_engines_own_prefix_cache"
BLOCK = 128
"""Tokens of a block: what vLLM's CPU backend has unless it is told otherwise."""
SHORT_STEPS = {"max_num_batched_tokens": BLOCK}
"""vLLM's kernel of Mamba 2 for processors fails with checkpoints within a step."""

KINDS = (
    Kind(
        "full attention",
        models=(
            Model(
                "run", "a tiny Llama", "test_prefixes.py::test_a_fresh_process_answers_as_the_engines_own_prefix_cache",
                {
                    "in bfloat16": "test_prefixes.py::test_a_fresh_process_answers_as_the_engines_own_prefix_cache",
                    "with two ranks": "test_engine_conformance.py::test_it_meets_the_requirements_of_connectors",
                    "two stages": "test_stages.py::"
                    "test_stages_keep_their_layers_and_one_that_lacks_a_chunk_makes_it_a_miss",
                    "two engines": "test_prefixes.py::test_two_engines_store_the_same_bytes",
                    "`vllm_blob` without `shards`": "test_prefixes.py::test_k_and_v_through_a_codec_that_reads_them",
                    "`vllm_blob` with `shards`": "test_prefixes.py::"
                    "test_k_and_v_of_two_ranks_are_loaded_by_one_and_the_other_way_round",
                    "LoRA": "test_trouble.py::test_adapters_do_not_meet",
                    "prompt embeddings": "test_inputs.py::test_embeddings_are_told_apart",
                    "`ngram` speculation": "test_inputs.py::test_guesses_that_were_wrong_are_not_stored",
                    "`draft_model` speculation": "test_inputs.py::test_a_draft_model_goes_on_from_its_own_kv",
                },
            ),
        ),
    ),
    Kind(
        "sliding windows beside full attention (Gemma 3, gpt-oss)",
        models=(
            Model(
                "hybrid", "a tiny Gemma 3", WINDOWS,
                {
                    "with two ranks": "test_windows.py::test_ranks_keep_their_parts_and_agree",
                    "two stages": "test_stages.py::test_a_stage_whose_loads_fail_has_the_request_computed",
                    "40 streams on 20 MiB of KV cache":
                    "test_windows.py::test_many_streams_with_aborts_while_the_cache_is_small",
                },
            ),
        ),
    ),
    Kind("sliding windows in all layers (Mistral 7B v0.1)", models=(Model("windowed", "a tiny Mistral", WINDOWS),)),
    Kind(
        "chunked local attention beside full attention (Llama 4)",
        models=(
            Model("local", "a tiny Llama 4", STATES, {"with two ranks": "test_states.py::test_ranks_keep_their_parts"}),
        ),
    ),
    Kind(
        "latents (MLA: DeepSeek-V2 and V3)",
        "yes, but for processors without AMX; all ranks share keys, and the first writes to shared tiers",
        models=(
            Model(
                "latents", "a tiny DeepSeek-V2 without experts", STATES,
                {"with two ranks": "test_prefixes.py::test_latent_kv_is_kept_once_for_all_ranks"},
                {"dtype": "bfloat16"}, "AMX",
            ),
        ),
    ),
    Kind(
        "short convolutions beside full attention (LFM2)",
        models=(
            Model(
                "convolutions", "a tiny LFM2", STATES, {"with two ranks": "test_states.py::test_ranks_keep_their_parts"}
            ),
        ),
    ),
    Kind(
        "Mamba 2, alone or beside full attention (Falcon H1, Granite 4, Nemotron H)",
        "yes; alone only with `--enable-prefix-caching`",
        models=(
            Model(
                "mamba2_alone", "a tiny Mamba 2", STATES,
                settings={**SHORT_STEPS, "block_size": BLOCK, "enable_prefix_caching": True},
            ),
            Model(
                "mamba2", "a tiny Falcon H1", STATES, settings=SHORT_STEPS,
                note="both with steps of one block, since vLLM's kernel for processors fails with the checkpoints of "
                "longer ones",
            ),
        ),
    ),
    Kind(
        "gated delta nets beside full attention (Qwen3-Next, Qwen3.5)",
        models=(Model("delta_nets", "a tiny Qwen3-Next", STATES, settings={"dtype": "bfloat16"}),),
    ),
    Kind(
        "Mamba 1 (Jamba), Kimi Delta Attention beside latents (Kimi Linear)",
        not_run="vLLM has no such kernels for processors",
    ),
    Kind(
        "windows of latents (DeepSeek-V4), sinks, retained prefixes (`RSWASpec`), cross attention",
        "refused; try [vLLM's own offloading](#vllms-own-offloading)",
    ),
)  # fmt: skip


def run_by(test: str) -> dict[str, Model]:
    """The models that a test is to run, by name."""
    return {model.name: model for kind in KINDS for model in kind.models if model.test == test}
