"""`kvloom config import --tokenizer`: the separator as token ids, by real tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kvloom import ConfigError
from kvloom.cli.main import app

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

APP = app()
FIELDS = {"enable_blending": True, "chunk_size": 16}
SPECIAL = "<|sep|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE as models have them: a BOS before each text, and a special token for separators."""
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|bos|>", SPECIAL], initial_alphabet=alphabet)
    made.train_from_iterator(["one # # Two documents # # in a prompt, # # and a question # # about them"] * 8, trainer)
    made.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    out = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<|bos|>").save_pretrained(out)
    return out


def invoke(tmp_path: Path, model: Path | str, **fields: Any) -> tuple[Any, dict[str, Any] | None]:
    file = tmp_path / "lmcache.yaml"
    file.write_text(yaml.safe_dump({**FIELDS, **fields}))
    result = CliRunner().invoke(APP, ["config", "import", str(file), "--tokenizer", str(model), "--strict"])
    return result, yaml.safe_load(result.stdout) if result.exit_code == 0 else None


@pytest.mark.parametrize("text", [" # # ", SPECIAL, "\n\n* * *\n\n", "资料"])
def test_the_separator_is_what_the_tokenizer_makes_of_it(folder: Path, tmp_path: Path, text: str) -> None:
    from transformers import AutoTokenizer

    result, config = invoke(tmp_path, folder, blend_special_str=text)
    assert config is not None, result.stderr
    tokens = config["blend"]["retriever"]["separator"]
    assert tokens and 0 not in tokens, "a BOS stands at the beginning of a prompt alone"
    assert AutoTokenizer.from_pretrained(folder).decode(tokens) == text


def test_left_out_it_is_lmcaches_own(folder: Path, tmp_path: Path) -> None:
    assert invoke(tmp_path, folder)[1] == invoke(tmp_path, folder, blend_special_str=" # # ")[1]


@pytest.mark.parametrize(("text", "merges"), [(" # # ", True), (SPECIAL, False)])
def test_tokens_that_are_others_within_a_text_are_told_of(
    folder: Path, tmp_path: Path, text: str, merges: bool
) -> None:
    """` # # ` ends with a blank, which is a part of the next word's token wherever there is one."""
    result, _ = invoke(tmp_path, folder, blend_special_str=text)
    assert ("merge with" in result.stderr) is merges


def test_a_model_of_the_repository(tmp_path: Path) -> None:
    weights = Path(__file__).parents[3] / "evals/pylm/weights"
    _, config = invoke(tmp_path, weights, blend_special_str="\n\n* * *\n\n")
    assert config is not None and config["blend"]["retriever"]["separator"] == [199, 199, 10, 365, 365, 455]


@pytest.mark.parametrize(
    ("text", "path"), [("", "blend_special_str"), (None, "blend_special_str"), (["a"], "blend_special_str")]
)
def test_what_is_no_separator_is_named(folder: Path, tmp_path: Path, text: Any, path: str) -> None:
    error = invoke(tmp_path, folder, blend_special_str=text)[0].exception
    assert isinstance(error, ConfigError) and error.path == path


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0", "model": {"type": "no such"}}'])
def test_what_is_no_tokenizer_is_one_line(tmp_path: Path, content: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = tmp_path / "model"
    model.mkdir()
    if content is not None:
        (model / "tokenizer.json").write_text(content)
        (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    error = invoke(tmp_path, model)[0].exception
    assert isinstance(error, ConfigError) and error.path == "--tokenizer" and len(str(error).splitlines()) == 1


def test_without_blending_nothing_is_tokenised(tmp_path: Path) -> None:
    assert invoke(tmp_path, tmp_path / "none", enable_blending=False)[0].exit_code == 0
