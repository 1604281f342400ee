"""One of the demo's two processes: `python -m kvloom_connector_transformers.demo.worker store|answer JOB`.

Reports on standard output, one JSON object per line: `{"doing": ...}`, then `{"result": {...}}` or
`{"error": ...}`.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM

from kvloom import KVLoomError

from ..model import CachedModel, Report, cached
from .job import Job, llama_shape

RUNS = 3
SETTLE_SECONDS = 1.0
"""Between opening an engine and asking it: its pool is made present in the background, on one of perhaps two cores."""
ANSWER_TOKENS = 48
_CHARACTERS_PER_TOKEN = 64
"""Maximum number of characters read of a document for each token that is wanted of it."""
_GREEDY = {"do_sample": False, "pad_token_id": 0}
_FIRST = {**_GREEDY, "max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}


class _Bytes:
    """A tokenizer for random weights: UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def main() -> None:
    role, path = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with torch.no_grad():
            result = {"store": store, "answer": answer}[role](Job.load(Path(path)))
    except (KVLoomError, OSError, ValueError) as error:
        say(error=f"{type(error).__name__}: {error}")
        sys.exit(1)
    say(result=result)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# -- the two processes -------------------------------------------------------------------------------------------------


def store(job: Job) -> dict[str, Any]:
    """Prefill the document and keep its KV."""
    model, tokenizer, load_seconds = load(job)
    document = read_document(job, model, tokenizer)
    say(doing=f"prefilling {document.shape[1]:,} tokens of {Path(job.document).name}")
    with cached(model, job.config) as ours:
        time.sleep(SETTLE_SECONDS)
        ours.generate(document, **_GREEDY, max_new_tokens=1)
        report = ours.last
        assert report is not None
        say(doing="writing its KV")
        began = time.perf_counter()
        flushed = ours.engine.flush()
        return {
            "load_seconds": load_seconds,
            "document_tokens": document.shape[1],
            "already_stored": report.hit_tokens,
            "stored": ours.engine.lookup(document[0]).tokens,
            "compute_seconds": report.compute_seconds,
            "store_seconds": report.store_seconds + time.perf_counter() - began,
            "kept_bytes": sum(tier.bytes for tier in ours.engine.health().tiers if tier.name != "memory"),
            "kv_bytes": bytes_per_token(ours) * ours.engine.lookup(document[0]).tokens,
            "note": report.note or ("" if flushed else "not everything was written in time"),
            "parameters": sum(tensor.numel() for tensor in model.parameters()),
            "model": model.config.model_type,
        }


def answer(job: Job) -> dict[str, Any]:
    """Answer from stored KV, measure that against doing without, and compare the logits of both."""
    model, tokenizer, load_seconds = load(job)
    document = read_document(job, model, tokenizer)
    question = torch.tensor([tokenizer.encode(job.question)])
    prompt = torch.cat([document, question], 1)

    # In turn, so that whatever else the machine does meets both.
    cold_seconds, cold, warm_runs = [], torch.empty(0), []
    for run in range(RUNS):
        say(doing=f"answering without kvloom, {run + 1} of {RUNS}")
        began = time.perf_counter()
        cold = model.generate(prompt, **_FIRST).logits[0]
        cold_seconds.append(time.perf_counter() - began)
        say(doing=f"answering from stored KV, {run + 1} of {RUNS}")
        # A fresh engine each time: its memory is empty, so that KV comes from the stored tier.
        with cached(model, job.config) as ours:
            time.sleep(SETTLE_SECONDS)
            warm_runs.append(warm_run(ours, prompt))
    _, seconds, report, counted = sorted(warm_runs, key=lambda run: run[1])[RUNS // 2]

    say(doing="the same split without kvloom, to compare bit for bit")
    same_split = after(model, document, report.hit_tokens, prompt)
    say(doing="another split without kvloom, to see what splitting alone changes")
    half = prompt[:, : prompt.shape[1] // 2]
    other_split = after(model, half, half.shape[1], prompt)

    say(doing="writing the answer")
    text, writing = "", {**_GREEDY, "max_new_tokens": ANSWER_TOKENS, "repetition_penalty": 1.15}
    with cached(model, job.config) as ours:
        output = ours.generate(prompt, **writing)
        if job.model:
            text = tokenizer.decode(output[0, prompt.shape[1] :])
    same_text = True
    if job.codec:
        say(doing="writing it without kvloom, to compare")
        same_text = torch.equal(model.generate(prompt, **writing), output)
    return {
        "load_seconds": load_seconds,
        "prompt_tokens": prompt.shape[1],
        "cold_seconds": median(cold_seconds),
        "warm_seconds": seconds,
        "report": asdict(report),
        "bytes": counted,
        "exact": all(torch.equal(logits, same_split) for logits, *_ in warm_runs),
        "cold_difference": max(difference(logits, cold) for logits, *_ in warm_runs),
        "split_difference": difference(other_split, cold),
        "resolution": torch.finfo(model.dtype).eps * float(cold.abs().max()),
        "same_token": all(bool(logits.argmax() == cold.argmax()) for logits, *_ in warm_runs),
        "text": text,
        "codec": job.codec,
        "same_text": same_text,
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


# -- parts of both -----------------------------------------------------------------------------------------------------


def load(job: Job) -> tuple[Any, Any, float]:
    """The model, run once to have everything lazy behind it; its tokenizer; how long that took in seconds."""
    began = time.perf_counter()
    if job.model:
        say(doing=f"loading {job.model}")
        model = AutoModelForCausalLM.from_pretrained(job.model)
        tokenizer = AutoTokenizer.from_pretrained(job.model)
    else:
        say(doing=f"making a Llama of {job.parameters:,} random parameters")
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256, max_position_embeddings=65_536, eos_token_id=None, **llama_shape(job.parameters)
            )
        )
        tokenizer = _Bytes()
    model.eval()
    model.generate(torch.full((1, 64), 5, device=model.device), **_GREEDY, max_new_tokens=2)
    return model, tokenizer, time.perf_counter() - began


def read_document(job: Job, model: Any, tokenizer: Any) -> torch.Tensor:
    """`[1, tokens]`. ValueError if question and answer don't fit behind it."""
    try:
        with Path(job.document).open(encoding="utf-8") as file:
            text = file.read(_CHARACTERS_PER_TOKEN * job.tokens)
    except UnicodeDecodeError:
        raise ValueError(f"{job.document} is not a text in UTF-8") from None
    ids = tokenizer.encode(text)[: job.tokens]
    room = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**31
    needed = len(ids) + len(tokenizer.encode(job.question)) + ANSWER_TOKENS
    if needed > room:
        raise ValueError(f"--tokens: {needed:,} tokens with question and answer; the model allows {room:,}")
    return torch.tensor([ids])


def warm_run(ours: CachedModel, prompt: torch.Tensor) -> tuple[torch.Tensor, float, Report, int]:
    """Logits, seconds to them, the report, and how many bytes of KV were loaded."""
    began = time.perf_counter()
    logits = ours.generate(prompt, store=False, **_FIRST).logits[0]
    seconds = time.perf_counter() - began
    assert ours.last is not None
    return logits, seconds, ours.last, bytes_per_token(ours) * ours.last.hit_tokens


def bytes_per_token(ours: CachedModel) -> int:
    """The size of a token's KV in the model."""
    spec = ours.engine.spec
    return spec.kv_planes * spec.num_layers * spec.hidden_dim * spec.torch_dtype.itemsize


def after(model: Any, first: torch.Tensor, keep: int, prompt: torch.Tensor) -> torch.Tensor:
    """Logits after `prompt`, computed on the KV of the first `keep` tokens of a prefill of `first`."""
    cache = DynamicCache(config=model.config)
    model.generate(first, **_GREEDY, max_new_tokens=1, past_key_values=cache)
    if keep < first.shape[1]:
        cache.crop(keep - first.shape[1])
    return model.generate(prompt, **_FIRST, past_key_values=cache).logits[0]


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


if __name__ == "__main__":
    main()
