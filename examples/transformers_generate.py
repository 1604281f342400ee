"""Three lines round a Hugging Face model. Run it twice: the second time the prompt is not prefilled.

    python examples/transformers_generate.py [MODEL]

MODEL: a path or a name on the hub; the default is the small model in evals/pylm.
"""

from __future__ import annotations

import heapq
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvloom_connector_transformers import cached

HERE = Path(__file__).parent


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else str(HERE.parent / "evals" / "pylm" / "weights")
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name)
    prompt = Path(heapq.__file__).read_text(encoding="utf-8")[:8000] + "\n\n\nIn short, this module"

    with cached(model, HERE / "laptop.yaml") as model:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=40, do_sample=False, repetition_penalty=1.15)
        print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
        print(model.last)


if __name__ == "__main__":
    main()
