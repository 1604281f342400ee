"""`kvloom calibrate`: from a model and text to an engine that starts, or says why it does not."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from kvloom import ConfigError, Engine, KVLoomError
from kvloom_serde_cachegen import kvloom_add_commands
from kvloom_serde_cachegen.calibration.calibrating import loaded
from kvloom_serde_cachegen.calibration.command import JUDGED, _break_even
from kvloom_serde_cachegen.profile import Profile

PYLM = Path(__file__).parents[3] / "evals/pylm/weights"
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("kvloom_connector_transformers") is None, reason="there is no connector for transformers"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of random weights, with a tokenizer."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "little"
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=96, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((PYLM / name).read_bytes())
    return path


@pytest.fixture
def calibrate(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the verb in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    commands = typer.Typer()
    commands.callback()(lambda: None)
    kvloom_add_commands(commands)

    def run(*arguments: Any, of: Path | str = model) -> Result:
        return CliRunner().invoke(commands, ["calibrate", "--model", str(of), *map(str, arguments)])

    return run


def spec_of(path: Path) -> Any:
    import transformers

    from kvloom_connector_transformers import spec_of

    return spec_of(transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto"))


def tier(**settings: Any) -> dict[str, Any]:
    return {"tiers": [{"type": "dict", "serializer": {"type": "cachegen", **settings}}]}


@needs_transformers
def test_a_profile_and_its_verdicts_let_an_engine_start(calibrate: Callable[..., Result], model: Path) -> None:
    done = calibrate("--text", __file__, "--tokens", 1500, "--verify", "--max-kl", "9", "--max-dnll", "9",
                     "--min-top1", "0")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.output.splitlines() if "passed" in line] == list(JUDGED)
    profile = Profile.load(Path("little.kvprofile"))
    assert (profile.model, profile.layers, profile.hidden, profile.head_size) == ("little", 2, 32, 16)
    assert profile.transform is not None and profile.rotary_size == 16 and profile.calibrated_tokens % (96 - 4) == 0
    verdicts = [profile.verdicts[codec] for codec in JUDGED if codec.startswith("step/")]
    assert [verdict.kl for verdict in verdicts] == sorted((verdict.kl for verdict in verdicts), reverse=True)
    assert [verdict.bits_per_value for verdict in verdicts] == sorted(verdict.bits_per_value for verdict in verdicts)
    assert all(0 <= verdict.kl_error < verdict.kl for verdict in verdicts)
    for settings in ({"quality": "small"}, {"mode": "klt"}, {"mode": "klt", "quality": "high"}):
        Engine.open(tier(profile="little.kvprofile", **settings), spec_of(model)).close()
    with pytest.raises(ConfigError, match="no verdict on step/1;"):
        Engine.open(tier(quality=1.0, profile="little.kvprofile"), spec_of(model))


@needs_transformers
def test_a_codec_that_fails_is_written_down_as_such(calibrate: Callable[..., Result], model: Path) -> None:
    few = ("--tokens", 500, "--no-klt", "--codec", "step/.75")
    Path("here").write_text("mine")
    done = calibrate("--text", __file__, "--out", "here")
    assert done.exit_code == 2 and "--force" in done.output and Path("here").read_text() == "mine"
    done = calibrate("--text", __file__, "--verify", *few, "--max-kl", "0", "--out", "here", "--force")
    assert done.exit_code == 0, done.output
    assert not any(verdict.passed for verdict in Profile.load(Path("here")).verdicts.values())
    with pytest.raises(ConfigError, match=r"step/0\.75 failed on little.*kl 0, "):
        Engine.open(tier(quality="small", profile="here"), spec_of(model))


@needs_transformers
def test_steps_may_be_chosen(calibrate: Callable[..., Result]) -> None:
    done = calibrate("--text", __file__, "--tokens", 500, "--verify", "--codec", "step/.60", "--codec", "klt/1",
                     "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["profile"] == "little.kvprofile" and said["bytes"] == Path("little.kvprofile").stat().st_size
    assert set(said["verdicts"]) == {"step/0.6", "klt/1"} and said["klt_saves_bytes_per_token"] is not None
    assert set(Profile.load(Path("little.kvprofile")).verdicts) == {"step/0.6", "klt/1"}
    for wrong in ("step", "step/x", "step/-1", "lossless/0.5", "klt/0.5", "step/0", "step/4.5"):
        done = calibrate("--text", __file__, "--tokens", 500, "--verify", "--no-klt", "--codec", wrong, "--force")
        assert done.exit_code == 2 and "--codec" in done.output
    for option, wrong in (("--max-kl", "nan"), ("--max-dnll", "inf"), ("--min-top1", "nan"), ("--tokens", "15")):
        done = calibrate("--text", __file__, "--tokens", 500, "--force", option, wrong)
        assert done.exit_code == 2 and option in done.output


@needs_transformers
def test_verdicts_have_the_scores_of_tasks(calibrate: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    kvloom_eval = pytest.importorskip("kvloom_eval")
    asked = []

    def judge(model: Any, tokenizer: Any, codecs: Any, *, items: int, dtype: torch.dtype, step: Any) -> Any:
        asked.append((list(codecs), items, dtype))
        highs = {"step/0.6": 0.01, "step/1": -0.1}
        return {name: {"recall/768": {"exact": 0.5, "codec": 0.4, "low": -0.2, "high": highs[name]}} for name in codecs}

    monkeypatch.setattr(kvloom_eval, "judge", judge)
    done = calibrate("--text", __file__, "--tokens", 500, "--no-klt", "--verify", "--codec", "step/0.6", "--codec",
                     "step/1", "--tasks", 3, "--max-kl", 9, "--max-dnll", 9, "--min-top1", 0)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert asked == [(["step/0.6", "step/1"], 3, torch.bfloat16)]
    verdicts = Profile.load(Path("little.kvprofile")).verdicts
    assert verdicts["step/0.6"].passed and verdicts["step/1"].worse == ["recall/768"] and not verdicts["step/1"].passed
    assert re.search(r"step/1 .*40\.0% +50\.0% +failed", done.output)
    assert "step/1 costs answers in recall/768\n" in done.output and "step/0.6 costs" not in done.output
    for wrong in (("--tasks", 3), ("--verify", "--tasks", 1)):
        done = calibrate("--text", __file__, "--force", *wrong)
        assert done.exit_code == 2 and "--tasks" in done.output
    monkeypatch.setitem(sys.modules, "kvloom_eval", None)
    done = calibrate("--text", __file__, "--force", "--verify", "--tasks", 3)
    assert re.search(r"--tasks needs kvloom-eval.*pip install", str(done.exception))


@pytest.mark.parametrize(
    ("saved", "says"), [(1000.0, "from 1,235 tokens on"), (0.0, "no smaller"), (-1.0, "no smaller")]
)
def test_when_a_profile_has_paid_for_itself(saved: float, says: str) -> None:
    assert says in _break_even(1_234_567, saved)


@needs_transformers
def test_without_verify_nothing_is_judged_and_without_klt_there_is_no_transform(
    calibrate: Callable[..., Result],
) -> None:
    assert calibrate("--text", __file__, "--no-klt", "--tokens", 500).exit_code == 0
    profile = Profile.load(Path("little.kvprofile"))
    assert not profile.verdicts and profile.transform is None and 400 < profile.calibrated_tokens <= 500


@needs_transformers
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--text", __file__, "--tokens", 50), r"46 tokens are too few for klt, which needs 64"),
        (("--text", "short", "--verify"), "no file has 96 tokens"),
        (("--text", "medium", "--verify"), r"last fifths of the files have \d+ pieces.*give --text more"),
        (("--text", "image"), "not a text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_said_with_the_remedy(
    calibrate: Callable[..., Result], arguments: tuple[Any, ...], says: str
) -> None:
    Path("short").write_text("few words", encoding="utf-8")
    Path("medium").write_text(" ".join(map(str, range(500))), encoding="utf-8")
    Path("image").write_bytes(b"\xff\xfe\x00")
    done = calibrate(*arguments)
    assert isinstance(done.exception, KVLoomError)
    with pytest.raises(KVLoomError, match=says):
        raise done.exception
    assert not list(Path().glob("*.kvprofile"))


@needs_transformers
def test_a_model_that_is_nowhere_is_an_error_in_one_line(calibrate: Callable[..., Result]) -> None:
    Path("empty").mkdir()
    assert isinstance(calibrate("--text", __file__, of="empty").exception, KVLoomError)


def test_without_transformers_the_verb_says_what_to_install(
    calibrate: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = calibrate("--text", __file__, of="any")
    assert re.search(r"pip install \S*serde.cachegen\[calibrate\]'", str(done.exception))


@pytest.mark.slow
@needs_transformers
def test_a_trained_model_loses_less_with_its_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same number of bits."""
    from kvloom_serde_cachegen import measuring
    from kvloom_serde_cachegen.calibration import text
    from kvloom_serde_cachegen.calibration.calibrating import calibrated, loaded, serializer
    from kvloom_serde_cachegen.serializer import CacheGenSerializer

    load, tokenizer, _ = loaded(str(PYLM), "cpu")
    model = load()
    files = sorted(Path(torch.__file__).parent.glob("nn/modules/*.py"))
    ours, theirs = text.read(files, tokens=8192)
    windows = text.windows(tokenizer, ours, length=512, count=8)
    profile, spec = calibrated(model, windows, name="pylm", klt=True)
    profile.save(tmp_path / "profile")
    plain = CacheGenSerializer(CacheGenSerializer.Config(quality=0.5), spec)
    codecs = {"with": serializer("step/0.5", tmp_path / "profile", spec), "without": plain}
    held_out = text.windows(tokenizer, theirs, length=384, count=8)
    measured = measuring.measure(
        model, held_out, {name: measuring.through(codec) for name, codec in codecs.items()}, context=256
    )
    one, other = measured["with"].mean, measured["without"].mean
    assert one.kl < 0.6 * other.kl and abs(one.bits_per_value - other.bits_per_value) < 0.05


def test_a_device_that_is_not_there_is_said_in_a_line() -> None:
    with pytest.raises(ValueError, match=r"^--device: 'nope' cannot be used here: .*\Z"):
        loaded("no model", "nope")


@needs_transformers
def test_a_place_that_cannot_be_written_to_is_no_matter_of_minutes(
    calibrate: Callable[..., Result], monkeypatch: pytest.MonkeyPatch,
    full_disk: Callable[[], AbstractContextManager[None]],
) -> None:  # fmt: skip
    monkeypatch.setattr("kvloom_serde_cachegen.calibration.command._calibrate", None)
    Path("folder").mkdir()
    unable = calibrate("--text", __file__, "--out", "folder", "--force")
    with full_disk():
        full = calibrate("--text", __file__, "--out", "here")
    for done, said in ((unable, "folder is a directory"), (full, "here cannot be written to (File too large)")):
        assert done.exit_code == 2 and "--out" in done.output
        assert said in " ".join(done.output.replace("│", "").split())


@needs_transformers
@pytest.mark.parametrize("more", [[], ["--tokens", "96", "--verify"]])
def test_text_that_is_too_short_is_said_before_a_model_is_loaded(
    calibrate: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    text = tmp_path / "text"
    text.write_text(" ".join(str(number) for number in range(100 if more else 9)))
    done = calibrate("--text", text, *more)
    assert isinstance(done.exception, KVLoomError) and "give --text more" in str(done.exception)
