"""One host: a model with kvloom over one store. Takes orders from stdin, one in each line, and answers in JSON."""

from __future__ import annotations

import heapq
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvloom_connector_transformers import cached

MODEL = Path(__file__).parents[2] / "evals" / "pylm" / "weights"
PROMPT = Path(heapq.__file__).read_text(encoding="utf-8")[:8000] + "\n\n\nIn short, this module"
WORDS = {"do_sample": False, "repetition_penalty": 1.15}
NEW_TOKENS = 24


class Host:
    """model: what `cached` gave. ids: the prompt, `[1, tokens]`."""

    def __init__(self, model: Any, tokenizer: Any, ids: torch.Tensor) -> None:
        self._model, self._tokenizer, self._ids = model, tokenizer, ids

    def cold(self) -> dict[str, Any]:
        """The model without kvloom: what is right, and how long it takes."""
        seconds = [self._first(self._model.model)[0] for _ in range(3)]
        return {
            "seconds": statistics.median(seconds),
            "text": self._text(self._model.model),
            "tokens": len(self._ids[0]),
        }

    def store(self) -> dict[str, Any]:
        """Prefill, and keep the KV."""
        seconds, _ = self._first(self._model)
        return {"seconds": seconds, "written": self._model.engine.flush(30)}

    def answer(self) -> dict[str, Any]:
        """Answer, from stored KV where that comes; nothing is kept."""
        seconds, hit = self._first(self._model, store=False)
        return {"seconds": seconds, "hit": hit, "text": self._text(self._model, store=False)}

    def _first(self, model: Any, **options: Any) -> tuple[float, int]:
        """The time to the first token, in seconds, and how many tokens of the prompt were not prefilled for it."""
        began = time.perf_counter()
        model.generate(self._ids, max_new_tokens=1, **WORDS, **options)
        report = getattr(model, "last", None)
        return time.perf_counter() - began, report.hit_tokens if report else 0

    def _text(self, model: Any, **options: Any) -> str:
        out = model.generate(self._ids, max_new_tokens=NEW_TOKENS, **WORDS, **options)
        return str(self._tokenizer.decode(out[0, self._ids.shape[1] :]))


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    config = {"connector": "transformers", "tiers": [json.loads(sys.argv[1])]}
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with cached(model, config) as model:
        host = Host(model, tokenizer, ids)
        for order in sys.stdin:
            print(json.dumps(getattr(host, order.strip())()), flush=True)


if __name__ == "__main__":
    main()
