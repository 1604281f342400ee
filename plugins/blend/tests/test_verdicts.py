"""Files of verdicts that engines read."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from kvloom import ConfigError, KVSpec
from kvloom_blend import verdicts
from kvloom_blend.executors import CacheBlendExecutor, EpicExecutor, HybridExecutor, QuestionAttentionExecutor
from kvloom_blend.settings import CacheBlendConfig, HybridConfig, RatioConfig

SPEC = KVSpec("Llama", 4, 2, 32, "bfloat16", revision="weights 1, config 2, on cpu: attention sdpa")
GOOD, BAD = {"failed": []}, {"failed": ["needle/1024 40.0% of right answers", "summary/1024 \x1b[31m" + "x" * 5000]}


def test_names_have_the_settings_that_are_not_the_defaults() -> None:
    assert verdicts.name_of("hybrid", RatioConfig(recompute_ratio=0.2, verdict=Path("it"))) == "hybrid/0.2"
    assert verdicts.name_of("hybrid", HybridConfig(metric="k", check_layers=(2,))) == (
        "hybrid/0.15, check_layers (2,), metric k"
    )
    assert verdicts.name_of("cacheblend", CacheBlendConfig(recompute_ratio=1.0)) == "cacheblend/1"


@pytest.mark.parametrize("cls", [CacheBlendExecutor, HybridExecutor, QuestionAttentionExecutor, EpicExecutor])
def test_a_verdict_is_of_one_model_and_of_one_executor(cls: type[EpicExecutor], tmp_path: Path) -> None:
    file = tmp_path / "verdicts"
    config = cls.Config(verdict=file)
    verdicts.save(file, SPEC, {f"{cls.type}/0.15": GOOD, "none": BAD})
    assert [one.name for one in tmp_path.iterdir()] == ["verdicts"]
    cls(config, SPEC)
    cls(config, replace(SPEC, revision="weights 1, config 2, on cuda: attention eager"))
    with pytest.raises(ConfigError, match=r"another model .*weights 1.*; this is .*weights 3"):
        cls(config, replace(SPEC, revision="weights 3"))
    verdicts.save(file, SPEC, {f"{cls.type}/0.15": BAD})
    with pytest.raises(ConfigError, match=r"/0\.15 failed on Llama: needle/1024 40\.0% of right answers") as refused:
        cls(config, SPEC)
    assert len(str(refused.value)) < 1200 and "\x1b" not in str(refused.value)
    cls(config)
    cls(cls.Config(), SPEC)


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "verdicts"
    with pytest.raises(ConfigError, match="cannot be read"):
        verdicts.check(file, SPEC, "epic/0.1")
    for text in ("", "[]", "{}", '{"format": "other"}', "[" * 100_000, '{"format": "kvloom-blend-verdicts/1"}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match="is no file of verdicts"):
            verdicts.check(file, SPEC, "epic/0.1")
    for made in ({"epic/0.1": {}}, {"epic/0.1": []}, {"epic/0.1": {"failed": 1}}, [[1, 2]], [["epic/0.1", GOOD]]):
        verdicts.save(file, SPEC, made)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="is no file of verdicts"):
            verdicts.check(file, SPEC, "epic/0.1")
    verdicts.save(file, SPEC, {"epic/0.1": GOOD})
    monkeypatch.setenv("HOME", str(tmp_path))
    verdicts.check(Path("~/verdicts"), SPEC, "epic/0.1")
    os.truncate(file, 1 << 40)
    os.mkfifo(tmp_path / "pipe")
    for each in (file, tmp_path / "pipe", tmp_path):
        with pytest.raises(ConfigError, match="is no file of verdicts"):
            verdicts.check(each, SPEC, "epic/0.1")


def test_a_full_disk_leaves_the_verdicts_of_before(
    tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    file = tmp_path / "verdicts"
    verdicts.save(file, SPEC, {"epic/0.1": GOOD})
    with full_disk(), pytest.raises(OSError, match="verdicts"):
        verdicts.save(file, SPEC, {})
    verdicts.check(file, SPEC, "epic/0.1")
