"""Real vLLM on a processor: models that are made here, and processes that run scripts (`make test-vllm`)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kinds import BLOCK
from warm import Warm, environment

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        import vllm  # noqa: F401
    except ImportError:
        for item in items:
            item.add_marker(
                pytest.mark.skip("vLLM is not installed here: make test-vllm has an environment of its own")
            )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 4 layers with a tokenizer of its own; the same weights every time."""
    import make_model

    folder = tmp_path_factory.getbasetemp().parent / "kvloom-vllm-tiny"
    make_model.make(folder)
    return folder


@pytest.fixture(scope="session")
def gemma(tiny: Path) -> Path:
    """A random Gemma 3 of 4 layers, every other one with a window of 256 tokens."""
    import make_model

    folder = tiny.with_name("kvloom-vllm-hybrid")
    make_model.make_hybrid(folder, tokenizer=tiny)
    return folder


@pytest.fixture(scope="session")
def mistral(tiny: Path) -> Path:
    """A random Mistral of 4 layers, all of them with a window of 256 tokens."""
    import make_model

    folder = tiny.with_name("kvloom-vllm-windowed")
    make_model.make_windowed(folder, tokenizer=tiny)
    return folder


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """A process that has imported vLLM."""
    process = Warm("drive", environment([HERE / "faulty", HERE], VLLM_ENABLE_V1_MULTIPROCESSING="0"))
    yield process
    process.close()


class Run:
    """Runs scripts, each in a process of its own; the tiers are in `folder` unless a call says otherwise."""

    def __init__(self, warm: Warm, model: Path, folder: Path) -> None:
        self._warm, self._model, self._folder = warm, model, folder
        self._count = 0

    def __call__(
        self, *do: dict[str, Any], tiers: Any = None, kv: dict[str, Any] | None = None, connector: bool = True,
        env: dict[str, str] | None = None, timeout: float = 400, fails: bool = False, fresh: bool = False,
        config: dict[str, Any] | None = None, extra: dict[str, Any] | None = None, **llm: Any,
    ) -> Any:  # fmt: skip
        """Run the actions `do`; return their results. fails: the start should fail; its output is returned. fresh: in a
        new interpreter."""
        self._count += 1
        folder, count = self._folder, self._count
        transfer = None
        if connector:
            yaml = folder / f"kvloom-{count}.yaml"  # JSON is YAML
            whole = {"chunk_tokens": BLOCK, "tiers": tiers or [memory(), disk(folder)], **(config or {})}
            yaml.write_text(json.dumps(whole))
            transfer = {
                "kv_connector": "KVLoomConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_module_path": "kvloom_connector_vllm.adapter",
                "kv_connector_extra_config": {"config": str(yaml), **(extra or {})}, **(kv or {}),
            }  # fmt: skip
        settings = {
            "model": str(self._model), "dtype": "float32", "enforce_eager": True, "max_model_len": 2048,
            "max_num_seqs": 8, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 64 << 20,
            "disable_log_stats": False, "distributed_executor_backend": "uni", "seed": 0, **llm,
        }  # fmt: skip
        script, out, log = (folder / f"{name}-{count}" for name in ("script", "out", "log"))
        script.write_text(json.dumps({"llm": settings, "kv": transfer, "do": list(do)}))
        code = (_fresh if fresh else self._forked)(script, out, log, env or {}, timeout)
        printed = log.read_text()
        if fails:
            assert code, "it should not have started"
            return printed
        assert code == 0, printed[-6000:]
        return json.loads(out.read_text())

    def footprint(self, dtype: str = "float32", **config: Any) -> Any:
        """The model's groups, as `kvloom plan --vllm` asks for them."""
        yaml, script, out, log = (self._folder / f"{name}-plan" for name in ("kvloom", "script", "out", "log"))
        whole = {"chunk_tokens": BLOCK, "tiers": [memory(), disk(self._folder)], **config}
        yaml.write_text(json.dumps(whole))
        script.write_text(json.dumps({"footprint": [str(self._model), str(yaml), dtype]}))
        code = self._forked(script, out, log, {}, 200)
        assert code == 0, log.read_text()[-6000:]
        return json.loads(out.read_text())

    def _forked(self, script: Path, out: Path, log: Path, env: dict[str, str], timeout: float) -> int:
        return self._warm.wait(self._warm.start([str(script), str(out)], env=env, log=log), timeout)


def _fresh(script: Path, out: Path, log: Path, env: dict[str, str], timeout: float) -> int:
    whole = environment([HERE / "faulty"], VLLM_ENABLE_V1_MULTIPROCESSING="0", **env)
    with log.open("w") as printed:
        return subprocess.run(
            [sys.executable, HERE / "drive.py", script, out], env=whole, timeout=timeout, stdout=printed,
            stderr=subprocess.STDOUT, check=False,
        ).returncode  # fmt: skip


@pytest.fixture
def run(warm: Warm, tiny: Path, tmp_path: Path) -> Run:
    return Run(warm, tiny, tmp_path)


@pytest.fixture
def hybrid(warm: Warm, gemma: Path, tmp_path: Path) -> Run:
    return Run(warm, gemma, tmp_path)


@pytest.fixture
def windowed(warm: Warm, mistral: Path, tmp_path: Path) -> Run:
    return Run(warm, mistral, tmp_path)


@pytest.fixture
def of_kind(warm: Warm, tiny: Path, tmp_path: Path) -> Callable[[str], Run]:
    """Runs scripts with a model of one of the kinds that `make_model.KINDS` names."""

    def made(kind: str) -> Run:
        import make_model

        folder = tiny.with_name(f"kvloom-vllm-{kind}")
        make_model.make_kind(kind, folder, tokenizer=tiny)
        return Run(warm, folder, tmp_path)

    return made


def has_amx() -> bool:
    """Return whether vLLM continues behind latents on this processor: without AMX its kernel does not."""
    return "amx_tile" in Path("/proc/cpuinfo").read_text()


def memory(capacity: str = "64MiB") -> dict[str, Any]:
    return {"type": "memory", "capacity": capacity}


def disk(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"type": "disk", "path": str(tmp_path / "kv"), "capacity": "1GiB", **more}


def faulty(tmp_path: Path, faults: Any = None, **more: Any) -> dict[str, Any]:
    """A disk that is disturbed as `faults` says, until the file says otherwise."""
    file = tmp_path / "faults.json"
    file.write_text(json.dumps(faults or {}))
    return {"type": "faulty", "path": str(tmp_path / "kv"), "faults": str(file), **more}


def tokens(seed: int, count: int) -> list[int]:
    """Token ids of the tiny model that follow from `seed`."""
    return [(number * (2 * seed + 37) + 11 * seed + number // 7) % 500 + 3 for number in range(count)]
