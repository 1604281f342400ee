"""Time to the first token in vLLM: cold, from its own prefix cache, and from kvloom's tiers, one after the other.

Each way is an engine in a process of its own; all are up at once, and requests go to them in turn, so that what else
the machine does meets all of them alike. Every measured prompt is new to whoever should not know it: `cold` and
`nothing to hit` get tokens that nobody has seen; the others get a prompt that was asked before, and more behind it.
What has nothing to hit is compared with vLLM that has a prefix cache and nothing in it.

    make bench-vllm
    python bench/vllm_ttft.py --rounds 5 --lengths 1024
    python bench/vllm_ttft.py --model path/to/SmolLM2-135M-Instruct --name smollm2
    python bench/vllm_ttft.py --kind windows --starts 3
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from table import Rows

ROOT = Path(__file__).parents[1]
TAIL = 32
BLOCK = 128
CHUNK = 256
"""Tokens of a chunk: the default."""
COLD, CONTROL, NOTHING = "no connector, cold", "vLLM's own prefix cache", "kvloom, nothing to hit"
COLD_CACHE = "no connector, cold, with a prefix cache"
"""For a model with states vLLM then computes a prompt in several steps, which end at its blocks."""
MODES = {
    COLD: None,
    CONTROL: None,
    NOTHING: ["memory", "disk"],
    "kvloom, memory": ["memory"],
    "kvloom, disk": ["disk"],
    "kvloom, disk, lossless": ["lossless"],
}


class Server:
    """One engine in a process of its own."""

    def __init__(self, mode: str, model: Path, folder: Path, dtype: str) -> None:
        self.mode = mode
        environment = {
            **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        }  # fmt: skip
        folder.mkdir(exist_ok=True)
        self.log = (folder / f"{len(mode)}-{mode.split()[-1]}.log").open("w")
        self.process = subprocess.Popen(
            [
                sys.executable, __file__, "--serve", mode, "--model", str(model), "--folder", str(folder),
                "--dtype", dtype,
            ],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
        )  # fmt: skip

    def ask(self, **message: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("SAID "):
                return json.loads(line[5:])
        raise RuntimeError(f"{self.mode}: it ended; see {self.log.name}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def longest_of(model: Path) -> int:
    """The tokens of the longest prompt with its answer."""
    return min(8192 + 2 * BLOCK, json.loads((model / "config.json").read_text())["max_position_embeddings"])


def serve(mode: str, model: Path, folder: Path, dtype: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    wanted, more = MODES[mode], {}
    if wanted is not None:
        tiers: list[Any] = []
        for name in wanted:
            if name == "memory":
                tiers.append({"type": "memory", "capacity": "2GiB"})
            else:
                codec = {"serializer": {"type": "cachegen", "mode": "lossless"}} if name == "lossless" else {}
                path = folder / f"kv-{name}-{mode.split()[-1]}"
                tiers.append({"type": "disk", "path": str(path), "capacity": "4GiB", **codec})
        transfer = KVTransferConfig(
            kv_connector="KVLoomConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
            kv_connector_module_path="kvloom_connector_vllm.adapter",
            kv_connector_extra_config={"config": {"chunk_tokens": CHUNK, "tiers": tiers}},
        )  # fmt: skip
        more["kv_transfer_config"] = transfer
    longest = longest_of(model)
    llm = LLM(
        model=str(model), dtype=dtype, enforce_eager=True, max_model_len=longest, max_num_seqs=4,
        max_num_batched_tokens=longest, kv_cache_memory_bytes=512 << 20, distributed_executor_backend="uni",
        enable_prefix_caching=mode != COLD, seed=0, **more,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("forget"):
            llm.reset_prefix_cache()
        began = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": message["prompt"]}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        if message.get("settle") and wanted is not None:
            connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
            while connector.has_pending_push_work():
                llm.llm_engine.step()
        print("SAID " + json.dumps({"seconds": seconds, "cached": output.num_cached_tokens}), flush=True)


def prompt(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(3, 500) for _ in range(count)]


def measure(servers: dict[str, Server], length: int, rounds: int, chance: random.Random) -> dict[str, list[float]]:
    """Seconds to the first token of `rounds` requests each way, in turn."""
    prefix = prompt(chance, length)
    known = [mode for mode in servers if mode not in (COLD, COLD_CACHE, NOTHING)]
    for mode in known:
        until = time.monotonic() + 600  # a codec writes behind, and a processor may take 10 s for each prompt
        settled = {"settle": True, "forget": mode != CONTROL}
        servers[mode].ask(prompt=prefix, **settled)
        while servers[mode].ask(prompt=prefix + prompt(chance, TAIL), **settled)["cached"] < length // BLOCK * BLOCK:
            if time.monotonic() > until:
                raise RuntimeError(f"{mode}: it does not store")
    ways = {**servers, COLD_CACHE: servers[CONTROL]}
    found: dict[str, list[float]] = {mode: [] for mode in ways}
    for number in range(rounds + 2):
        order = list(ways)
        chance.shuffle(order)
        for mode in order:
            fresh = mode not in known
            asked = prompt(chance, length + TAIL) if fresh else prefix + prompt(chance, TAIL)
            said = ways[mode].ask(prompt=asked, forget=mode != CONTROL and not fresh, settle=fresh)
            expected = 0 if fresh else length // BLOCK * BLOCK
            if said["cached"] != expected:
                raise RuntimeError(f"{mode}: {said['cached']} tokens were found, not {expected}")
            if number >= 2:  # the first ones warm up
                found[mode].append(said["seconds"])
        print(f"\r{length} tokens: round {number + 1} of {rounds + 2}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--starts", type=int, default=1, help="of each engine; two of the same code differ by up to 10%%"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4064, 4096, 8192])
    parser.add_argument("--serve")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; otherwise a small random Llama is made")
    parser.add_argument(
        "--kind", default="", help="of the model that is made: windows, gemma3, delta_nets, convolutions"
    )
    parser.add_argument("--dtype", default="bfloat16", help="float32 is faster on processors without AVX-512")
    parser.add_argument("--name", default="", help="the model's, in the name of the results; default: its kind")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.model, arguments.folder, arguments.dtype)
        return
    sys.path.insert(0, str(ROOT / "plugins/connector_vllm/tests_vllm"))
    import make_model

    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = arguments.model or folder / "model"
        if arguments.model is None:
            make_model.make(model, maximum=16384, dtype="bfloat16")
        if arguments.kind:
            model, tokenizer = folder / arguments.kind, model
            if arguments.kind == "windows":
                make_model.make_hybrid(model, tokenizer=tokenizer)
            elif arguments.kind == "gemma3":
                make_model.make_gemma3(model, tokenizer=tokenizer)
            else:
                make_model.make_kind(arguments.kind, model, tokenizer=tokenizer)
        results: dict[int, dict[str, list[list[float]]]] = {}
        for start in range(arguments.starts):
            servers = {mode: Server(mode, model, folder / str(start), arguments.dtype) for mode in MODES}
            try:
                for mode, server in servers.items():
                    print(f"start {start + 1} of {arguments.starts}: {mode}", file=sys.stderr)
                    server.ask(prompt=prompt(chance, 200))
                    server.ask(prompt=prompt(chance, 200))
                for length in arguments.lengths:
                    if length + TAIL < longest_of(model):
                        found = measure(servers, length, arguments.rounds, chance)
                        for mode, seconds in found.items():
                            results.setdefault(length, {}).setdefault(mode, []).append(seconds)
            finally:
                for server in servers.values():
                    server.close()
        report(results, arguments.name or arguments.kind)


def report(results: dict[int, dict[str, list[list[float]]]], name: str) -> None:
    """Medians over all requests; where engines were started several times, the ratio of each start beside."""
    rows = Rows("_".join(["vllm_ttft", *([name] if name else [])]))
    for length, by_mode in results.items():
        for mode, starts in by_mode.items():
            control = {COLD: COLD, COLD_CACHE: COLD, NOTHING: COLD_CACHE}.get(mode, CONTROL)
            seconds, limits = ([one for start in some for one in start] for some in (starts, by_mode[control]))
            low, middle, high = statistics.quantiles(seconds, n=4)
            limit = statistics.median(limits)
            medians = zip(map(statistics.median, starts), map(statistics.median, by_mode[control]), strict=True)
            rows.add(
                f"{length} tokens: {mode}",
                f"{middle * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f}, n={len(seconds)})",
                f"{limit * 1e3:.1f} ms, {control}",
                middle / limit,
                by_start=[round(one / other, 3) for one, other in medians],
                seconds=[[round(one, 5) for one in start] for start in starts],
            )
    rows.finish()


if __name__ == "__main__":
    main()
