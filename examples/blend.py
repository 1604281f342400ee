"""Questions over documents in any order: each document is computed once. Run it twice: then none is computed at all.

python examples/blend.py
"""

from __future__ import annotations

import csv
import json
import shelve
import time
from inspect import getdoc
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvloom_blend import blended

HERE = Path(__file__).parent
SEPARATOR = [199, 199, 10, 365, 365, 455]  # as in blend.yaml


def main() -> None:
    name = str(HERE.parent / "evals" / "pylm" / "weights")
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    documents = [tokenizer.encode(getdoc(module) or "")[:400] for module in (csv, json, shelve)]

    with blended(model, HERE / "blend.yaml") as it:
        computed = sum(it.remember(torch.tensor(document)) for document in documents)
        print(f"{computed} of {sum(map(len, documents))} tokens of documents computed")
        for order, question in (((0, 1, 2), "A shelf is a"), ((2, 1, 0), "To write rows, use csv.")):
            parts = [token for number in order for token in documents[number] + SEPARATOR]
            prompt = torch.tensor(parts + tokenizer.encode(question))
            began = time.perf_counter()
            it.prefill(prompt)
            seconds = time.perf_counter() - began
            output = it.generate(prompt, max_new_tokens=20, do_sample=False)
            assert it.last is not None
            print(f"{seconds * 1e3:.0f} ms to the first token, {it.last.computed_share:.0%} of the rows computed")
            print(question + tokenizer.decode(output[0, len(prompt) :]))


if __name__ == "__main__":
    main()
