"""`kvloom plan`: the shape of KV that it reads from a model's config, a spec, a name, or the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_support import SPEC

from kvloom import ConfigError, KVSpec
from kvloom_tools.shapes import Given, spec_of

CONFIGS: dict[str, tuple[dict[str, Any], tuple[int, int, int, str, int]]] = {
    "llama": (
        {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192,
         "torch_dtype": "bfloat16"},
        (80, 8, 128, "bfloat16", 2),
    ),
    "head_dim of its own": (
        {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 1024,
         "head_dim": 128, "dtype": "float16"},
        (28, 8, 128, "float16", 2),
    ),
    "all heads": (
        {"n_layer": 12, "n_head": 12, "n_embd": 768}, (12, 12, 64, "bfloat16", 2)
    ),
    "latent": (
        {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
         "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"},
        (61, 1, 576, "bfloat16", 1),
    ),
    "one head for all": (
        {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True},
        (32, 1, 64, "bfloat16", 2),
    ),
    "text inside": (
        {"model_type": "x", "torch_dtype": "float16", "text_config": {
            "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 2560,
            "head_dim": 256}},
        (34, 4, 256, "float16", 2),
    ),
}  # fmt: skip


def shape(spec: KVSpec) -> tuple[int, int, int, str, int]:
    return (spec.num_layers, spec.num_kv_heads, spec.head_size, spec.dtype, spec.kv_planes)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_models_config(tmp_path: Path, name: str) -> None:
    written, expected = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(written))
    for model in (tmp_path, tmp_path / "config.json"):
        assert shape(spec_of(Given(str(model)))) == expected


def test_what_the_command_line_says_wins(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"][0]))
    assert shape(spec_of(Given(str(tmp_path), kv_heads=1, dtype="int8"))) == (80, 1, 128, "int8", 2)
    assert shape(spec_of(Given(layers=3, kv_heads=4, head_size=5))) == (3, 4, 5, "bfloat16", 2)


def test_a_spec_and_a_record_of_one(tmp_path: Path) -> None:
    for index, text in enumerate((SPEC.to_json(), json.dumps({"identity": {}, "spec": json.loads(SPEC.to_json())}))):
        (tmp_path / f"{index}.json").write_text(text)
        assert spec_of(Given(str(tmp_path / f"{index}.json"))) == SPEC


def test_a_name_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    snapshot = tmp_path / "models--org--name/snapshots" / ("0a" * 20)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIGS["llama"][0]))
    (tmp_path / "models--org--name/refs").mkdir()
    (tmp_path / "models--org--name/refs/main").write_text("0a" * 20)
    real: Callable[..., Any] = hub.try_to_load_from_cache
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *names: real(*names, cache_dir=tmp_path))
    spec = spec_of(Given("org/name"))
    assert (spec.model, *shape(spec)) == ("org/name", 80, 8, 128, "bfloat16", 2)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (Given(), r"--spec: give a spec, or all of --layers, --kv-heads and --head-size"),
        (Given(layers=2, head_size=4), r"--spec: give a spec, or all of"),
        (
            Given("no/such-model"),
            r"--spec: 'no/such-model' is neither a file nor a directory, and not in the hub's cache",
        ),
        (Given("???"), r"--spec: '\?\?\?' is neither a file"),
        (Given(layers=1, kv_heads=1, head_size=1, dtype="int3"), r"--spec: KVSpec.dtype must be one of"),
    ],
)
def test_what_is_no_model(given: Given, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{problem}"):
        spec_of(given)


def test_a_directory_without_a_model_is_told_from_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a directory without config\.json, and not in the hub's cache"):
        spec_of(Given(str(tmp_path)))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "should be a KVSpec or a model's config.json"),
        ("{}", "no 'num_hidden_layers' in it; say --layers, --kv-heads, --head-size and --dtype instead"),
        ('{"num_hidden_layers": 2}', "no 'num_attention_heads' in it; say --layers"),
        ('{"num_layers": 0, "head_size": 3}', "no field 'model'; say --layers"),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        spec_of(Given(str(tmp_path)))
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"text_config": "x"}', "its text_config is a str and no mapping; say --layers"),
        ('{"spec": []}', "its spec is a list and no mapping; say --layers"),
        ('{"num_hidden_layers": 1e400, "num_attention_heads": 4, "hidden_size": 64}', "its num_hidden_layers is no"),
        ('{"num_hidden_layers": 2, "num_attention_heads": 0.5, "hidden_size": 64}', "its num_attention_heads is no"),
        ('{"num_hidden_layers": 2, "num_attention_heads": -4, "hidden_size": 64}', "its num_attention_heads is no"),
        ('{"num_hidden_layers": "2", "num_attention_heads": 4, "hidden_size": 64}', "its num_hidden_layers is no"),
        ('{"num_hidden_layers": 2, "kv_lora_rank": "8", "qk_rope_head_dim": 4}', "its kv_lora_rank is no whole number"),
        ('{"num_layers": 1, "head_size": 8, "num_kv_heads": 1, "model": "m", "dtype": "int8", "rope": {"a": NaN}}',
         "KVSpec.rope must be what JSON can say"),
    ],
)  # fmt: skip
def test_a_file_that_describes_no_model(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"config\.json: {problem}"):
        spec_of(Given(str(tmp_path / "config.json")))
