"""`vllm serve` with clients that stream at the same time, restarted in the middle; and what /metrics says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import BLOCK, disk, memory, tokens
from warm import environment

from kvloom_testkit.faults import free_port

openai = pytest.importorskip("openai")

SHARED = tokens(1, 640)
PROMPTS = [SHARED + tokens(20 + number, 20 + number) for number in range(6)]


@contextmanager
def serving(model: Path, config: Path, log: Path, role: str = "kv_both", more: Sequence[str] = ()) -> Iterator[str]:
    """The address of a server with kvloom, found by its entry point: no module path is given. more: arguments."""
    port = free_port()
    transfer = {
        "kv_connector": "KVLoomConnector", "kv_role": role, "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": str(config)},
    }  # fmt: skip
    # As `vllm serve` does; its command looks for a distribution that has another name on processors.
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8",
        "--served-model-name", "tiny", "--kv-cache-memory-bytes", str(128 << 20),
        "--kv-transfer-config", json.dumps(transfer), *more,
    ]  # fmt: skip
    with log.open("w") as out:
        server = subprocess.Popen(
            command, env=environment(VLLM_CPU_OMP_THREADS_BIND="nobind"), stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 300
        while not _healthy(address):
            assert server.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.5)
        yield address
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            raise AssertionError("the server did not end") from None


def _healthy(address: str) -> bool:
    try:
        return urllib.request.urlopen(f"{address}/health", timeout=2).status == 200
    except (urllib.error.URLError, OSError):
        return False


def complete(address: str, prompt: list[int], count: int = 24, rank: int | None = None) -> list[str]:
    """The pieces of text that were streamed. rank: of the engine, of several, that has to answer."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    headers = {"Content-Type": "application/json", **({} if rank is None else {"X-data-parallel-rank": str(rank)})}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
    pieces: list[Any] = []
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                pieces += choice.get("token_ids") or []
    return pieces


def metric(address: str, name: str, **labels: str) -> float:
    text = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode()
    lines = [line for line in text.splitlines() if line.startswith(name)]
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in wanted))


def test_a_restarted_server_answers_from_what_the_first_stored(tiny: Path, tmp_path: Path) -> None:
    """The second one has two engines (data parallelism) on the same tier, of which a blob was damaged."""
    config = tmp_path / "kvloom.yaml"
    config.write_text(json.dumps({"chunk_tokens": BLOCK, "tiers": [memory(), disk(tmp_path)]}))
    with serving(tiny, config, tmp_path / "first.log") as address, ThreadPoolExecutor(6) as clients:
        first = list(clients.map(lambda prompt: complete(address, prompt), PROMPTS))
        assert all(len(one) == 24 for one in first)
        assert metric(address, "vllm:external_prefix_cache_hits_total") == 0
        until = time.monotonic() + 60
        while metric(address, "kvloom_tokens_total", event="stored", tier="disk") < 640:
            assert time.monotonic() < until, "it is not stored, or not counted"
            complete(address, tokens(99, 10), 2)
            time.sleep(1.1)
    blobs = sorted(path for path in (tmp_path / "kv").rglob("4-*") if path.is_file())
    data = bytearray(blobs[0].read_bytes())
    data[-len(data) // 2] ^= 0x10
    blobs[0].write_bytes(data)
    two = ("--data-parallel-size", "2")
    with serving(tiny, config, tmp_path / "second.log", more=two) as address, ThreadPoolExecutor(6) as clients:
        ranks = [number % 2 for number in range(len(PROMPTS))]
        second = list(clients.map(lambda prompt, rank: complete(address, prompt, rank=rank), PROMPTS, ranks))
        assert second == first
        for rank in (0, 1):
            assert metric(address, "vllm:external_prefix_cache_hits_total", engine=str(rank)) >= 512
        time.sleep(1.1)
        complete(address, tokens(99, 10), 2, rank=0)
        assert metric(address, "kvloom_tokens_total", event="retrieved") >= 512
        assert "Traceback" not in (tmp_path / "second.log").read_text()


def test_one_engine_prefills_and_another_generates(tiny: Path, tmp_path: Path) -> None:
    config = tmp_path / "kvloom.yaml"
    config.write_text(json.dumps({"chunk_tokens": BLOCK, "tiers": [disk(tmp_path)]}))
    port = free_port()
    example = Path(__file__).parents[3] / "examples/vllm/disaggregated.py"
    with (
        serving(tiny, config, tmp_path / "prefill.log", "kv_producer") as prefill,
        serving(tiny, config, tmp_path / "decode.log", "kv_consumer") as decode,
        ThreadPoolExecutor(4) as clients,
    ):
        proxy = subprocess.Popen(
            [sys.executable, example, "--prefill", prefill, "--decode", decode, "--port", str(port)]
        )
        try:
            until = time.monotonic() + 30
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert time.monotonic() < until
                time.sleep(0.1)
            address = f"http://127.0.0.1:{port}"
            found = list(clients.map(lambda prompt: complete(address, prompt), PROMPTS[:4]))
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
            assert [model.id for model in client.models.list().data] == ["tiny"]
            asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "keys and values"}]}
            chat = client.chat.completions.create(**asked, temperature=0, max_completion_tokens=5)
            stream = client.chat.completions.create(
                **asked, temperature=0, max_completion_tokens=5, stream=True, stream_options={"include_usage": True}
            )
            *pieces, last = list(stream)
            text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
            assert text == chat.choices[0].message.content and last.usage.completion_tokens == 5
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                client.completions.create(model="other", prompt="x")
        finally:
            proxy.kill()
            proxy.wait()
        assert metric(decode, "vllm:external_prefix_cache_hits_total") >= 4 * 640 - 3 * 640, "prompts share 640 tokens"
        assert metric(prefill, "vllm:external_prefix_cache_hits_total") == 0, "it only stores"
        assert all(len(one) == 24 for one in found)
        expected = [complete(prefill, prompt) for prompt in PROMPTS[:4]]
        assert found == expected
