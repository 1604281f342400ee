"""A small random model and a tokenizer of characters: what is tested is the measuring, not the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from kvloom_eval import text  # noqa: E402 - it needs transformers

WEIGHTS = Path(__file__).parents[3] / "evals" / "pylm" / "weights"
"""A tokenizer."""


class Characters:
    """A token for each character, and a chat template."""

    chat_template = "a template"

    def __call__(self, text: str, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(each) for each in text])

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **options: Any) -> str:
        said = "".join(f"<{each['role']}>{each['content']}</>" for each in messages)
        return f"<system>Answer.</>{said}<assistant>"


@pytest.fixture
def characters() -> Characters:
    return Characters()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def little_text() -> Iterator[None]:
    """Windows of eight files, since to split all that a Python has into tokens takes seconds."""
    files = text._files
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_files", lambda *, held_out: files(held_out=held_out)[:8])
        yield


def llama(vocabulary: int, longest: int = 1024) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, initializer_range=0.4, max_position_embeddings=longest,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model() -> Any:
    return llama(512)


@pytest.fixture
def short() -> Any:
    """A model of 300 tokens."""
    return llama(64, longest=300)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers without a chat template."""
    place = tmp_path_factory.mktemp("models") / "small"
    llama(4096).save_pretrained(place)
    transformers.AutoTokenizer.from_pretrained(WEIGHTS).save_pretrained(place)
    return place
