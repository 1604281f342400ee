"""PEFT adapters are part of whose KV it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvloom_connector_transformers import cached, spec_of

peft = pytest.importorskip("peft", reason="peft is not installed")

Make = Callable[..., PreTrainedModel]


def lora(make: Make, *names: str, seed: int = 0, **settings: Any) -> Any:
    """A llama with adapters whose B matrices are not zero, as after training."""
    fields: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}
    config = peft.LoraConfig(**fields | settings)
    model = peft.get_peft_model(make("llama"), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if any(f".{name}" in key for name in names):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return model.eval()


def test_base_model_is_recognised_under_its_adapters(make: Make) -> None:
    bare = spec_of(make("llama"))
    model = lora(make, "x", modules_to_save=["lm_head"])
    spec = spec_of(model)
    assert spec.revision == bare.revision
    assert len(spec.adapters) == 1 and spec.adapters[0].startswith("lora:")
    with model.disable_adapter():
        assert spec_of(model) == bare


def test_same_adapter_is_the_same_wherever_it_comes_from(make: Make, tmp_path: Path) -> None:
    model = lora(make, "x")
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(make("llama"), tmp_path / "x", adapter_name="y")
    assert spec_of(loaded) == spec_of(model)
    injected = make("llama")
    injected.load_adapter(str(tmp_path / "x"))
    assert spec_of(injected.eval()) == spec_of(model)


def test_weights_scaling_and_order_of_adapters_count(make: Make) -> None:
    model = lora(make, "x", "y")
    seen = [spec_of(model)]
    model.set_adapter("y")
    seen.append(spec_of(model))
    for names in (["x", "y"], ["y", "x"]):
        model.base_model.set_adapter(names)
        seen.append(spec_of(model))
    model.set_adapter("x")
    for layer in model.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(0.5)
    seen.append(spec_of(model))
    seen.append(spec_of(lora(make, "x", seed=1)))
    seen.append(spec_of(lora(make, "x", use_rslora=True)))
    seen.append(spec_of(lora(make, "x", modules_to_save=["embed_tokens"])))
    seen.append(spec_of(transposed := lora(make, "x")))
    transposed.peft_config["x"].fan_in_fan_out = True
    seen.append(spec_of(transposed))
    texts = [spec.to_json() for spec in seen]
    assert len(set(texts)) == len(texts)


def test_merging_is_noticed(make: Make) -> None:
    model = lora(make, "x")
    before = spec_of(model)
    model.merge_adapter()
    merged = spec_of(model)
    assert merged.adapters == () and merged.revision != before.revision
    with model.disable_adapter(), pytest.raises(ValueError, match="merged and disabled"):
        spec_of(model)


def test_adapters_switched_between_calls_share_nothing(
    make: Make, config: dict[str, Any], prompt: torch.Tensor
) -> None:
    peft_model = lora(make, "x", "y")
    with cached(peft_model, config) as model:

        def generates(hit: int) -> None:
            expected = peft_model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)
            assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), expected)
            assert model.last is not None and model.last.hit_tokens == hit

        for name, hit in (("x", 0), ("y", 0), ("x", 64), ("y", 64)):
            peft_model.set_adapter(name)
            generates(hit)
        for hit in (0, 64):
            with peft_model.disable_adapter():
                generates(hit)
        peft_model.merge_adapter()
        generates(0)
        peft_model.unmerge_adapter()
        with torch.no_grad():
            next(p for n, p in peft_model.named_parameters() if "lora_B.y" in n)[0, 0] += 1.0
        generates(0)


def test_adapters_whose_effect_depends_on_the_whole_prompt_are_refused(make: Make) -> None:
    prompts = peft.get_peft_model(make("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="adapter 'default': prompt_tuning puts virtual tokens"):
        spec_of(prompts.eval())
    with pytest.raises(ValueError, match="adapter 'x': aLoRA"):
        spec_of(lora(make, "x", task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6]))


def test_dropout_of_an_adapter_in_training_mode_is_refused(make: Make, config: dict[str, Any]) -> None:
    model = make("llama")
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1))
    assert not model.training
    with cached(model, config) as opened, pytest.raises(ValueError, match="training mode"):
        opened.generate(torch.tensor([[4, 5, 6]]), max_new_tokens=1)
