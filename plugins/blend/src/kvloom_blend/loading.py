"""Loads a model and its tokenizer for the verbs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvloom import ConfigError


def loaded(name: str, dtype: str | None) -> tuple[Any, Any]:
    """dtype: of torch, by name; None: that of the model's files. Raises ConfigError if it cannot be loaded."""
    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ConfigError("--model", f"there is no directory {name!r}")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("--model", f"{name} cannot be loaded: {str(error).splitlines()[0]}") from error
    return model.eval(), tokenizer


def default_model() -> str:
    """The trained model of the repository, from this folder or one above it. Raises ConfigError if it is not there."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        weights = folder / "evals" / "pylm" / "weights"
        if (weights / "model.safetensors").is_file():
            return str(weights)
    raise ConfigError("--model", "evals/pylm is not in this folder nor above it; name a model")
