"""Train `pylm`, a small Llama that reads like Python documentation and code, on a CPU.

Data (nothing is downloaded by this script): the reStructuredText sources of the Python 3.11 documentation
(Debian package python3.11-doc, PSF licence) and the Python 3.11 standard library (PSF licence). Documents whose path
has crc32 % 20 == 0 are held out; `--list-held-out` prints them.

    python train.py --docs DIR --out weights --minutes 60

Writes Hugging Face files: config.json, model.safetensors (bf16), tokenizer.json, tokenizer_config.json.
"""

import argparse
import json
import math
import sysconfig
import time
import zlib
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB, EOS = 4096, "<|end|>"


def documents(docs_dir: Path):
    """Yields (weight, path, text): documentation counts twice, the standard library once, tests left out."""
    for path in sorted(docs_dir.rglob("*.rst.txt")):
        yield 2, path.relative_to(docs_dir), path.read_text(errors="replace")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).parts
        if {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"} & set(parts):
            continue
        yield 1, path.relative_to(stdlib), path.read_text(errors="replace")


def held_out(path: Path) -> bool:
    return zlib.crc32(str(path).encode()) % 20 == 0


def make_tokenizer(texts) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=[EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    return tok


def encode(tok: Tokenizer, texts) -> torch.Tensor:
    eos = tok.token_to_id(EOS)
    ids = []
    for enc in tok.encode_batch(list(texts)):
        ids.append(eos)
        ids.extend(enc.ids)
    return torch.tensor(ids, dtype=torch.int32)


def batches(stream: torch.Tensor, length: int, size: int, gen: torch.Generator):
    while True:
        at = torch.randint(0, len(stream) - length - 1, (size,), generator=gen)
        yield torch.stack([stream[i : i + length] for i in at]).long()


@torch.no_grad()
def held_out_loss(model, stream, length=1024, windows=24) -> float:
    model.eval()
    step = (len(stream) - length) // windows
    total = 0.0
    for i in range(windows):
        ids = stream[i * step : i * step + length].long()[None]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total += model(ids, labels=ids).loss.item()
    model.train()
    return total / windows


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--docs", type=Path, required=True)
    ap.add_argument("--out", type=Path, default=Path("weights"))
    ap.add_argument("--minutes", type=float, default=60)
    ap.add_argument("--list-held-out", action="store_true")
    args = ap.parse_args()
    torch.manual_seed(0)

    docs = list(documents(args.docs))
    train = [(w, t) for w, p, t in docs if not held_out(p)]
    test = [t for w, p, t in docs if held_out(p)]
    if args.list_held_out:
        print(*[p for w, p, t in docs if held_out(p)], sep="\n")
        return
    tok = make_tokenizer(t for _, t in train)
    stream = encode(tok, [t for w, t in train for _ in range(w)])
    test_stream = encode(tok, test)
    print(f"train {len(stream) / 1e6:.1f} M tokens, held out {len(test_stream) / 1e6:.2f} M", flush=True)

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    decay = [p for p in model.parameters() if p.ndim > 1]
    other = [p for p in model.parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}],
        lr=2e-3,
        betas=(0.9, 0.95),
        fused=True,
    )

    # Short windows first, long ones last: the KV of long contexts is what the model is for.
    phases = [(512, 16, 0.70), (1024, 8, 0.15), (4096, 2, 0.15)]
    start, seconds, step, tokens = time.time(), args.minutes * 60, 0, 0
    gen = torch.Generator().manual_seed(1)
    done = 0.0
    for length, size, share in phases:
        done += share
        source = batches(stream, length, size, gen)
        while (now := (time.time() - start) / seconds) < done:
            lr = 2e-3 * min(1, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(now, 1))))
            for group in opt.param_groups:
                group["lr"] = lr
            ids = next(source)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            step, tokens = step + 1, tokens + ids.numel()
            if step % 50 == 0:
                print(
                    f"step {step} {tokens / 1e6:.2f} M tokens {time.time() - start:.0f} s length {length} "
                    f"loss {loss.item():.3f}",
                    flush=True,
                )
            if step % 500 == 0:
                print(f"  held out {held_out_loss(model, test_stream):.3f} nats/token", flush=True)

    loss = held_out_loss(model, test_stream)
    text_bytes = sum(len(t.encode()) for t in test)
    print(
        f"done: {step} steps, {tokens / 1e6:.2f} M tokens, held out {loss:.4f} nats/token, "
        f"{loss * len(test_stream) / text_bytes / math.log(2):.3f} bits/byte"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    PreTrainedTokenizerFast(tokenizer_object=tok, eos_token=EOS, bos_token=EOS).save_pretrained(args.out)
    (args.out / "training.json").write_text(
        json.dumps({"steps": step, "tokens": tokens, "held_out_nats_per_token": loss, "vocab": VOCAB}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
