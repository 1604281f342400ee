"""Everything that decides K and V changes the fingerprint, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvloom import Engine, KVSpec
from kvloom_connector_transformers import spec_of
from kvloom_connector_transformers.identity import signature
from kvloom_connector_transformers.weights import full_digest, sampled_digest

Make = Callable[..., PreTrainedModel]


def fingerprint(model: Any, config: dict[str, Any]) -> str:
    with Engine.open(config, spec_of(model)) as engine:
        return engine.fingerprint


def test_fields(llama: PreTrainedModel) -> None:
    spec = spec_of(llama)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_size, spec.dtype) == (3, 2, 8, "float32")
    assert spec.model == "LlamaForCausalLM"
    assert spec.rope["rope_theta"] == llama.config.rope_parameters["rope_theta"]
    assert f"on cpu: attention {llama.config._attn_implementation}, " in spec.revision
    assert KVSpec.from_json(spec.to_json()) == spec


def test_loading_again_from_elsewhere_is_the_same_model(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        llama.save_pretrained(tmp_path / name)
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    second = AutoModelForCausalLM.from_pretrained("b")
    assert spec_of(first) == spec_of(second) == spec_of(llama)


def test_one_changed_weight_is_another_model(make: Make, config: dict[str, Any]) -> None:
    one, other = make("llama"), make("llama")
    assert fingerprint(one, config) == fingerprint(other, config)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[17, 5] += 1e-4
    assert fingerprint(one, config) != fingerprint(other, config)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
        lambda model: setattr(model.config, "rope_parameters", {"rope_type": "default", "rope_theta": 7.0}),
        lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    ],
    ids=["dtype", "attention", "config", "rope", "frequencies"],
)
def test_changes_that_change_the_fingerprint(
    make: Make, config: dict[str, Any], change: Callable[[PreTrainedModel], Any]
) -> None:
    model = make("llama")
    before = fingerprint(model, config)
    change(model)
    assert fingerprint(model, config) != before


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_cache", False), ("eos_token_id", 5), ("_name_or_path", "x"), ("transformers_version", "5")],
)
def test_settings_that_no_kv_depends_on(llama: PreTrainedModel, name: str, value: Any) -> None:
    before = spec_of(llama)
    setattr(llama.config, name, value)
    assert spec_of(llama) == before


def test_the_commit_of_a_hub_stands_for_the_weights_with_a_sample(make: Make) -> None:
    model, other = make("llama"), make("llama", seed=1)
    for one in (model, other):
        one.config._commit_hash = "c0ffee"
        one.config._name_or_path = one.name_or_path = "team/model"
    spec = spec_of(model)
    assert spec.model == "team/model"
    assert spec.revision.startswith("commit c0ffee, sampled weights ")
    assert spec_of(other).revision != spec.revision


def test_autocast_is_part_of_it(llama: PreTrainedModel) -> None:
    # Its K and V are float32 all the same: a DynamicLayer takes the dtype of K after the rotation.
    plain, before = spec_of(llama), signature(llama)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert signature(llama) != before
        assert spec_of(llama) != plain
    assert signature(llama) == before


def test_matmul_precision_is_part_of_it(llama: PreTrainedModel) -> None:
    before, then = spec_of(llama), signature(llama)
    torch.set_float32_matmul_precision("medium")
    try:
        assert spec_of(llama) != before
        assert signature(llama) != then
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_config_that_changes_between_calls_is_part_of_it(llama: PreTrainedModel) -> None:
    before, then = spec_of(llama), signature(llama)
    llama.config.sliding_window = 8  # read at each forward of the models that have one
    assert spec_of(llama) != before and signature(llama) != then
    del llama.config.sliding_window
    assert spec_of(llama) == before and signature(llama) == then


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.detach().__setitem__((3, 3), 1.0),
        lambda weight: weight.data.add_(1e-3),
        lambda weight: setattr(weight, "data", weight.data.clone()),
    ],
    ids=["one element, in place", "all of it, past the version counter", "replaced"],
)
def test_signature_sees_weights_change(llama: PreTrainedModel, change: Callable[[torch.Tensor], Any]) -> None:
    before = signature(llama)
    assert signature(llama) == before
    llama.generate(torch.tensor([[4, 5]]), max_new_tokens=2)
    assert signature(llama) == before
    change(llama.model.layers[2].self_attn.v_proj.weight)
    assert signature(llama) != before


def test_digests_see_names_shapes_and_dtypes() -> None:
    tensor = torch.zeros(6)
    for digest in (full_digest, sampled_digest):
        variants = [
            [("a", tensor)],
            [("b", tensor)],
            [("a", tensor.view(2, 3))],
            [("a", tensor.to(torch.int32))],
            [("a", tensor), ("b", tensor)],
            [("a", torch.zeros(0))],
            [("a", torch.zeros(6, dtype=torch.bfloat16))],
        ]
        assert len({digest(variant) for variant in variants}) == len(variants)
        assert digest([("a", tensor), ("b", tensor + 1)]) == digest([("b", tensor + 1), ("a", tensor)])
        assert digest([("a", tensor.view(2, 3).t())]) == digest([("a", torch.zeros(3, 2))])


@pytest.mark.parametrize("column", [0, 1, 100, 255])
def test_sampled_digest_reaches_every_column(column: int) -> None:
    tensor = torch.zeros(512, 256)
    before = sampled_digest([("a", tensor)])
    tensor[:, column] = 1
    assert sampled_digest([("a", tensor)]) != before


def test_full_digest_reads_every_byte() -> None:
    tensor = torch.zeros(1000, dtype=torch.bfloat16)
    before = full_digest([("a", tensor)])
    for index in (0, 499, 999):
        changed = tensor.clone()
        changed[index] = 1
        assert full_digest([("a", changed)]) != before
