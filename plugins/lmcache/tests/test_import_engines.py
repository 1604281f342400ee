"""Configurations as people have them for LMCache, imported, opened, and hit: examples/lmcache, and a small model."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import kvloom
from kvloom.cli.main import app

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "evals/pylm/weights")
APP = app()
PASSWORD = "n0b0dys"
NAMES = ("cpu_offload", "disk_cachegen", "redis_blending", "peers")
NATIVE = {
    "disk_cachegen": "kvloom_serde_cachegen",
    "redis_blending": "kvloom_blend",
    "peers": "kvloom_backend_mooncake",
}
"""Plugins that are installed where there is a C++ compiler."""


def imported(fields: dict[str, Any], folder: Path, *arguments: str) -> Path:
    """The file that `kvloom config import --strict` makes of them, with nothing left behind."""
    file, out = folder / "lmcache.yaml", folder / "kv.yaml"
    file.write_text(yaml.safe_dump(fields))
    done = CliRunner().invoke(APP, ["config", "import", str(file), "-o", str(out), "--strict", *arguments])
    assert done.exit_code == 0, done.stderr
    return out


def of(name: str, **changed: Any) -> dict[str, Any]:
    """The fields of an example, with places of this machine."""
    fields: dict[str, Any] = yaml.safe_load((ROOT / f"examples/lmcache/{name}.yaml").read_text())
    return {**fields, **changed}


@pytest.mark.parametrize("name", NAMES)
def test_each_example_gives_exactly_the_file_beside_it(name: str, tmp_path: Path) -> None:
    out = tmp_path / f"{name}.yaml"
    model = ["--tokenizer", MODEL] if name == "redis_blending" else []
    source = str(ROOT / f"examples/lmcache/{name}.yaml")
    done = CliRunner().invoke(APP, ["config", "import", source, "-o", str(out), "--strict", *model])
    assert done.exit_code == 0, done.stderr
    assert out.read_text() == (ROOT / f"examples/from_lmcache/{name}.yaml").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_each_file_is_a_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(NATIVE.get(name, "kvloom"))
    monkeypatch.setenv("REDIS_PASSWORD", PASSWORD)
    config = kvloom.EngineConfig.from_file(ROOT / f"examples/from_lmcache/{name}.yaml")
    kvloom.config.resolve(config, kvloom.Registry.discover())


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)("The json module reads JSON. " * 70, return_tensors="pt").input_ids[
        :, :300
    ]


def ask(model: Any, config: Path, prompt: torch.Tensor, times: int = 1) -> list[Any]:
    """The tokens reused, each time, by one process's engine."""
    from kvloom_connector_transformers import cached

    reports = []
    with cached(model, config) as it:
        for _ in range(times):
            it.generate(prompt, max_new_tokens=2, do_sample=False)
            reports.append(it.last)
        assert it.engine.flush(30)
    return reports


@pytest.mark.parametrize(("unfull", "expected"), [(False, 256), (True, 256 + 32)])
def test_in_memory_what_was_asked_is_hit(
    model: Any, prompt: torch.Tensor, tmp_path: Path, unfull: bool, expected: int
) -> None:
    fields = of("cpu_offload", max_local_cpu_size=0.25, save_unfull_chunk=unfull)
    config = imported(fields, tmp_path, "--connector", "transformers")
    first, second = ask(model, config, prompt, times=2)
    assert first.hit_tokens == 0 and second.hit_tokens == expected, "one chunk, and half of what is behind it"


@pytest.mark.slow
def test_on_disk_and_by_cachegen_what_was_asked_is_hit_by_another_engine(
    model: Any, prompt: torch.Tensor, tmp_path: Path
) -> None:
    pytest.importorskip("kvloom_serde_cachegen")
    fields = of(
        "disk_cachegen", max_local_cpu_size=0.25, max_local_disk_size=1, local_disk=f"file://{tmp_path}/disk",
        remote_url=f"fs://localhost:0{tmp_path}/mnt", save_unfull_chunk=False,
    )  # fmt: skip
    config = imported(fields, tmp_path, "--connector", "transformers")
    assert ask(model, config, prompt)[0].hit_tokens == 0
    assert ask(model, config, prompt)[0].hit_tokens == 256
    bytes_of = [
        sum(one.stat().st_size for one in (tmp_path / at).rglob("*") if one.is_file()) for at in ("disk", "mnt")
    ]
    assert 0 < bytes_of[1] < bytes_of[0] / 2, "CacheGen's blobs are small"
    shutil.rmtree(tmp_path / "disk")
    assert ask(model, config, prompt)[0].hit_tokens == 256, "from CacheGen's blobs alone"


@pytest.fixture
def redis_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A real server that asks for a password."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    limits = ["--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru", "--save", "", "--appendonly", "no"]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--requirepass", PASSWORD, *limits]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as server:
        for _ in range(100):
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.05)
        monkeypatch.setenv("REDIS_PASSWORD", PASSWORD)
        yield f"redis://:{PASSWORD}@127.0.0.1:{port}"
        server.terminate()


@pytest.mark.slow
def test_by_redis_passages_are_hit_in_another_order_by_another_engine(
    model: Any, tmp_path: Path, redis_url: str
) -> None:
    from transformers import AutoTokenizer

    blended = pytest.importorskip("kvloom_blend").blended

    fields = of("redis_blending", max_local_cpu_size=0.25, remote_url=redis_url)
    config = imported(fields, tmp_path, "--tokenizer", MODEL)
    assert PASSWORD not in config.read_text()
    read = AutoTokenizer.from_pretrained(MODEL)
    separator = read(fields["blend_special_str"], add_special_tokens=False).input_ids
    documents = [read(f"The {name} module reads and writes {name}. " * 20).input_ids for name in ("csv", "json")]
    with blended(model, config) as it:
        for document in documents:
            assert it.remember(torch.tensor(document)) == len(document)
        assert it.engine.flush(30)
    parts = [token for document in reversed(documents) for token in separator + document] + separator
    with blended(model, config) as it:
        assert it.remember(torch.tensor(documents[0])) == 0, "the Redis has it"
        done = it.prefill(torch.tensor(parts + read("To write rows, use").input_ids))
        assert done.blended_tokens > 100 and done.computed_share < 0.6


def test_a_pool_of_peers_is_told_where_its_master_is() -> None:
    """No master runs here; plugins/backend_mooncake's own tests have one. Both ways over give the same tier."""
    pytest.importorskip("kvloom_backend_mooncake")
    config = kvloom.EngineConfig.from_file(ROOT / "examples/from_lmcache/peers.yaml")
    ours = kvloom.EngineConfig.from_defaults(
        enable_p2p=True, lookup_url="mooncake://10.0.0.1:50051", distributed_url="10.0.0.2:8200"
    )
    pools = [kvloom.config.resolve(one, kvloom.Registry.discover()).tiers[1].backend for one in (config, ours)]
    assert pools[0] == pools[1] and pools[0] is not None and pools[0].config.segment == 5 << 30


@pytest.mark.parametrize(
    ("serializer", "taken"),
    [
        ("raw", True), ("torch", True), ("safetensors", True), ({"type": "cachegen", "mode": "lossless"}, True),
        ("cachegen", False), ({"type": "torch", "dtype": "float16"}, False),
    ],
)  # fmt: skip
def test_which_serializers_take_vllms_pages_as_they_are(serializer: Any, taken: bool, tmp_path: Path) -> None:
    """As docs/use/vllm.md describes the connector `vllm`, and as the importer chooses `vllm_blob`."""
    pytest.importorskip("kvloom_connector_vllm")
    pytest.importorskip("kvloom_serde_cachegen")
    geometry = {"layers": 2, "block_tokens": 16, "page_elements": 64}
    config = {
        "chunk_tokens": 16, "connector": {"type": "vllm", "geometry": geometry},
        "tiers": [{"type": "disk", "path": str(tmp_path / "kv"), "serializer": serializer}],
    }  # fmt: skip
    spec = kvloom.KVSpec("m", num_layers=2, num_kv_heads=1, head_size=2, dtype="float32")
    pages = [torch.rand(4, 64) for _ in range(2)]
    kept = [layer.clone() for layer in pages]
    if not taken:
        with pytest.raises(kvloom.ConfigError, match=r"takes KV_BLOB; the connector gives KV_PAGES"):
            kvloom.Engine.open(config, spec)
        return
    tokens, where = torch.arange(32), {"pages": pages, "blocks": [3, 1], "first_block": 0}
    with kvloom.Engine.open(config, spec) as engine:
        engine.store(tokens, **where)
        assert engine.flush(30)
    for layer in pages:
        layer.zero_()
    with kvloom.Engine.open(config, spec) as engine:
        assert engine.retrieve(tokens, **where).all()
    assert all(torch.equal(new[[3, 1]], old[[3, 1]]) for new, old in zip(pages, kept, strict=True))
