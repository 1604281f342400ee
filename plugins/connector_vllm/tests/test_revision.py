"""The revision of a model in vLLM: its weights, configuration, code and settings."""

from __future__ import annotations

import sys
from dataclasses import field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from identity_support import namespace
from pydantic import Field
from pydantic.dataclasses import dataclass
from vllm_fakes import vllm_config


@pytest.fixture
def read_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A configuration of a model whose files are read again as vLLM does."""

    def get_config(source: str, *_: Any, hf_overrides_fn: Any = None, **__: Any) -> SimpleNamespace:
        read = SimpleNamespace(source=source, rms_norm_eps=1e-6)
        read = hf_overrides_fn(read) if hf_overrides_fn else read
        return SimpleNamespace(to_dict=lambda: vars(read))

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.transformers_utils", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.transformers_utils.config", SimpleNamespace(get_config=get_config))
    config = vllm_config(str(model))
    more = {"trust_remote_code": False, "code_revision": None, "config_format": "auto", "hf_overrides": {}}
    vars(config.model_config).update(more)
    return config


def test_overrides_by_a_function_count_by_what_they_do(read_again: SimpleNamespace) -> None:
    """The function of the next start may have the same name and another body."""

    def started(**changes: Any) -> str:
        def patched(config: Any) -> Any:
            vars(config).update(changes)
            return config

        read_again.model_config.hf_overrides = patched
        return namespace(read_again)

    assert started(rms_norm_eps=0.5) == started(rms_norm_eps=0.5)
    assert len({started(), started(rms_norm_eps=0.5), started(architectures=["Other"])}) == 3


def test_overrides_by_a_function_that_does_something_else_each_time_are_refused(read_again: SimpleNamespace) -> None:
    numbers = iter(range(10))
    read_again.model_config.hf_overrides = lambda config: SimpleNamespace(**vars(config), more=next(numbers))
    with pytest.raises(ValueError, match=r"hf_overrides: .* the same configuration each time"):
        namespace(read_again)


def test_what_a_model_changes_in_its_configuration_while_it_loads_does_not_count(read_again: SimpleNamespace) -> None:
    """vLLM's scheduler does not see it if ranks are processes of their own. Overrides by the user count."""
    config = read_again
    before = namespace(config)
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: {"attn_temperature_tuning": False})
    assert namespace(config) == before
    config.model_config.hf_overrides = {"rope_theta": 1}
    assert namespace(config) != before


def test_a_model_may_be_a_file_or_have_its_weights_elsewhere(tmp_path: Path) -> None:
    one = tmp_path / "model.gguf"
    one.write_bytes(b"1" * 100)
    before = namespace(vllm_config(str(one)))
    one.write_bytes(b"2" * 100)
    assert namespace(vllm_config(str(one))) != before
    config = vllm_config("somebody/model-that-is-not-here")
    assert namespace(config) == namespace(config)


class Media(SimpleNamespace):
    """vLLM's `MultiModalConfig`, with its defaults."""

    def __init__(self, **changes: Any) -> None:
        usual = {"mm_processor_cache_gb": 4, "mm_processor_kwargs": None, "mm_device_do_normalize": True}
        super().__init__(**{**usual, **changes})


def test_settings_that_change_an_images_embeddings_have_another_name(model: Path, tmp_path: Path) -> None:
    """vLLM's hash of an image covers the arguments of its request, and not the server's."""
    config, scales = vllm_config(str(model)), tmp_path / "scales.json"

    def named(**changes: Any) -> str:
        config.model_config.multimodal_config = Media(**changes)
        return namespace(config)

    plain = named()
    assert plain == named(mm_processor_cache_gb=8, mm_processor_kwargs={}) == namespace(vllm_config(str(model)))
    found = [
        named(mm_processor_kwargs={"max_pixels": 3136}), named(mm_processor_kwargs={"max_pixels": 200704}),
        named(mm_encoder_attn_dtype="fp8"), named(mm_device_do_normalize=False), named(video_pruning_rate=0.5),
        named(video_pruning_rate=0.5, video_pruning_method="vidcom2"),
    ]  # fmt: skip
    for content in ("one", "two"):
        scales.write_text(content)
        found.append(named(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(scales)))
    assert len({plain, *found}) == len(found) + 1


@dataclass
class Settings:
    """A block of a later vLLM."""

    backend: str = ""
    load_format: str = "auto"
    max_loras: int = 1
    seed: int = 0
    added: str = "auto"
    listed: list[str] = field(default_factory=lambda: ["a"])
    described: int = Field(default=3, ge=0)
    made: list[str] = Field(default_factory=lambda: ["a"])


@pytest.mark.parametrize("block", ["model_config", "load_config", "lora_config", "attention_config"])
def test_settings_that_are_not_known_to_change_nothing_count(model: Path, block: str) -> None:
    """Those of a later vLLM, too. Its defaults do not, so that two versions share what they compute alike."""
    config = vllm_config(str(model))
    config.model_config.dtype = "torch.bfloat16"
    here = getattr(config, block, SimpleNamespace())

    def named(**changed: Any) -> str:
        settings = Settings(**changed)
        for name, value in vars(here).items():
            setattr(settings, name, value)
        setattr(config, block, settings)
        return namespace(config)

    usual = {namespace(config), named(), named(added="torch.bfloat16")}
    assert len(usual) == 1, "auto becomes the model's dtype"
    changed = [{"added": "other"}, {"listed": ["b"]}, {"described": 4}, {"made": []}, {"added": "x" * 1000}]
    assert len(usual | {named(**each) for each in changed}) == 6
    known = {"model_config": "seed", "load_config": "load_format", "lora_config": "max_loras"}.get(block, "backend")
    assert {named(**{known: 2 if known in ("seed", "max_loras") else "pt"})} == usual
