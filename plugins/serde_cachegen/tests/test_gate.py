"""The gate: who may lose how much, and what those are told who may not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from profiles import profile_of

from kvloom import Chunk, ConfigError, Engine, KVSpec, MemoryFormat
from kvloom_serde_cachegen.profile import Verdict
from kvloom_serde_cachegen.serializer import CacheGenSerializer

SPEC = KVSpec("Llama", 2, 2, 32, "bfloat16", revision="weights 1, config 2, on cpu: attention sdpa")
PASSED = Verdict(1e-3, 2e-4, 1e-5, 0.99, 2.5, 4096, True, {"kl": 1e-3})
FAILED = replace(PASSED, kl=0.125, passed=False)


def serializer(spec: KVSpec | None = SPEC, **settings: Any) -> CacheGenSerializer:
    return CacheGenSerializer(CacheGenSerializer.Config.model_validate(settings), spec)


@pytest.fixture
def profile(tmp_path: Path) -> Any:
    """Writes a profile of the model of SPEC, with changes."""

    def write(**change: Any) -> Path:
        profile_of(**{"identity": SPEC.identity, "verdicts": {}, **change}).save(tmp_path / "profile")
        return tmp_path / "profile"

    return write


LITTLE = [{}, {"quality": "high"}, {"quality": 0.74}, {"mode": "lossless"}, {"mode": "cachegen"}]


@pytest.mark.parametrize("settings", [*LITTLE, {"quality": "small", "codec_gate": "off"}], ids=str)
def test_what_loses_little_or_takes_the_risk_needs_no_verdict(settings: dict[str, Any]) -> None:
    serializer(**settings)


@pytest.mark.parametrize("settings", [{"quality": "small"}, {"quality": 0.75}, {"quality": 2.0}, {"codec_gate": "on"}])
def test_what_loses_much_needs_a_profile(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"kvloom calibrate --model MODEL --text FILE --verify.*codec_gate: off"):
        serializer(**settings)


def test_a_verdict_lets_its_own_step_through_and_no_other(profile: Any) -> None:
    path = profile(verdicts={"step/0.75": PASSED, "step/1": FAILED})
    serializer(profile=path, quality="small")
    serializer(replace(SPEC, revision="weights 1, config 2, on cuda: attention eager"), profile=path, quality="small")
    with pytest.raises(ValueError, match=r"step/1 failed.*KL 0\.12.*kl 0\.001"):
        serializer(profile=path, quality=1.0)
    serializer(profile=path, quality=1.0, codec_gate=False)
    with pytest.raises(ValueError, match=r"no verdict on step/0\.8; use one that it has \(step/0\.75, step/1\)"):
        serializer(profile=path, quality=0.8)


def test_a_codec_that_costs_answers_is_refused_and_the_score_named(profile: Any) -> None:
    held = {"exact": 0.75, "codec": 0.71, "low": -0.09, "high": 0.01}
    lost = {"exact": 0.75, "codec": 0.5, "low": -0.4, "high": -0.1}
    kept, broken = PASSED.with_scores({"recall/1024": held}), PASSED.with_scores({"a": held, "needle/1024": lost})
    path = profile(verdicts={"step/0.75": kept, "step/1": broken})
    serializer(profile=path, quality="small")
    with pytest.raises(
        ValueError, match=r"step/1 failed.*; needle/1024 50\.0% of right answers, 75\.0% with exact KV;"
    ):
        serializer(profile=path, quality=1.0)
    assert not FAILED.with_scores({"recall/1024": held}).passed


def test_an_error_names_some_tasks_only(profile: Any) -> None:
    lost = {"exact": 0.75, "codec": 0.5, "low": -0.4, "high": -0.1}
    path = profile(verdicts={"step/1": PASSED.with_scores({f"task {each}": lost for each in range(1000)})})
    with pytest.raises(ValueError, match="; task 104 50") as caught:
        serializer(profile=path, quality=1.0)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "score",
    [{"exact": 0.5}, *({"exact": 0.5, "codec": 0.5, "low": 0.0, "high": each} for each in ("-1", math.nan, -math.inf))],
    ids=str,
)
def test_scores_have_one_form(score: Any) -> None:
    with pytest.raises(ValueError, match="needle"):
        PASSED.with_scores({"needle": score})


def test_the_verdict_on_another_model_says_nothing(profile: Any) -> None:
    path = profile(verdicts={"step/0.75": PASSED})
    other = replace(SPEC, revision="weights 9, config 2, on cpu: attention sdpa")
    with pytest.raises(ValueError, match=r"another model.*weights 9"):
        serializer(other, profile=path, quality="small")
    serializer(other, profile=path)


@pytest.mark.parametrize(
    "change", [{"num_layers": 3}, {"num_kv_heads": 1}, {"head_size": 16, "num_kv_heads": 4}, {"kv_planes": 1}], ids=str
)
def test_a_profile_of_another_shape_is_refused_gate_or_not(profile: Any, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"profile: .* is of a model.*\(2, 2, 64, 32\)"):
        serializer(replace(SPEC, **change), profile=profile(), codec_gate=False)


def test_a_file_that_is_missing_or_damaged_is_refused(profile: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere cannot be read.*kvloom calibrate"):
        serializer(profile=tmp_path / "nowhere")
    path = profile()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=str(path)):
        serializer(profile=path)


@pytest.mark.parametrize("setting", [{"profile": "it"}, {"codec_gate": "on"}, {"quality": "high"}], ids=str)
def test_other_modes_have_no_such_settings(setting: dict[str, Any]) -> None:
    for mode in ("lossless", "cachegen"):
        with pytest.raises(ValueError, match=f"{next(iter(setting))} is a setting of mode: step"):
            serializer(mode=mode, **setting)


def test_an_engine_says_where_and_what_to_do() -> None:
    tier = {"type": "dict", "serializer": {"type": "cachegen", "quality": "small"}}
    with pytest.raises(
        ConfigError, match=r"^tiers\.0\.serializer: .*kvloom calibrate --model MODEL --text FILE --verify"
    ):
        Engine.open({"tiers": [tier]}, SPEC)


@pytest.mark.parametrize("planes", [1, 2])
def test_steps_follow_the_profile(profile: Any, planes: int) -> None:
    """Those of K, and those of V if the profile is not of an older kvloom."""
    weights = torch.ones(2, 2, 64)
    weights[..., :32], weights[..., 32:] = 0.1, 1.9
    kv = torch.randn(2, 2, 256, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    chunk, back = (Chunk(each, MemoryFormat.KV_BLOB, 256) for each in (kv, torch.empty_like(kv)))
    errors = []
    for settings in ({"profile": profile(weights=weights if planes == 2 else weights[0])}, {}):
        serializer().decode(serializer(**settings).encode(chunk), back)
        off = (back.tensor.float() - kv.float()).square().mean((1, 2)).sqrt()
        errors.append(off[:, 32:].mean(1) / off[:, :32].mean(1))
    assert errors[0][0] > 10
    assert errors[0][1] > 10 if planes == 2 else 0.8 < errors[0][1] < 1.25
    assert 0.8 < errors[1][0] < 1.25, "without a profile all are alike"


def test_kv_of_another_shape_than_the_profile_is_not_encoded(profile: Any) -> None:
    with pytest.raises(ValueError, match="profile"):
        serializer(None, profile=profile()).encode(Chunk(torch.zeros(2, 2, 4, 32), MemoryFormat.KV_BLOB, 4))


def test_what_a_file_says_of_itself_is_shown_on_one_line_and_cut(profile: Any) -> None:
    said = "\x1b[2J\n" + "x" * 10_000
    failed = {"step/0.75": replace(FAILED, limits={said: 1e-3})}
    for changes in ({"model": said, "layers": 3}, {"identity": said}, {"verdicts": {said: PASSED}}, {"model": said,
                    "verdicts": failed}):  # fmt: skip
        with pytest.raises(ValueError) as caught:
            serializer(quality="small", profile=profile(**changes))
        assert str(caught.value).isprintable() and len(str(caught.value)) < 2000
