"""Real vLLM on a processor, with a small model that is made here (`make test-vllm`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warm import Warm, environment

HERE = Path(__file__).parent
SEPARATOR = 2


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


def settings(folder: Path, executor: str, **blend: Any) -> dict[str, Any]:
    """Settings that both `blended` and the connector take; the tiers are in `folder`."""
    return {
        "connector": "transformers", "chunk_tokens": 64,
        "tiers": [{"type": "memory", "capacity": "256MiB"}, {"type": "disk", "path": str(folder), "capacity": "1GiB"}],
        "blend": {
            "executor": executor, "retriever": {"type": "separator", "separator": SEPARATOR, "lead": [0]},
            "min_tokens": 64, **blend,
        },
    }  # fmt: skip


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """A process that has imported vLLM."""
    process = Warm("drive_blend", environment([HERE], VLLM_ENABLE_V1_MULTIPROCESSING="0"))
    yield process
    process.close()


class Run:
    """Runs scripts, each in a process of its own."""

    def __init__(self, warm: Warm, model: Path, folder: Path) -> None:
        self._warm, self._model, self._folder = warm, model, folder
        self._count = 0

    def __call__(
        self, *do: dict[str, Any], config: dict[str, Any] | None = None, kv: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None, env: dict[str, str] | None = None, fails: bool = False, **llm: Any,
    ) -> Any:  # fmt: skip
        """Run the actions `do`; return their results. config: of the engine that blends; without one, vLLM runs alone.

        fails: the start should fail; its output is returned.
        """
        self._count += 1
        transfer = None
        if config is not None:
            yaml = self._folder / f"kvloom-{self._count}.yaml"  # JSON is YAML
            yaml.write_text(json.dumps(config))
            transfer = {
                "kv_connector": "KVLoomBlendConnector", "kv_connector_module_path": "kvloom_blend.vllm",
                "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"config": str(yaml), **(extra or {})}, **(kv or {}),
            }  # fmt: skip
        arguments = {
            "model": str(self._model), "dtype": "float32", "enforce_eager": True, "max_model_len": 2048,
            "max_num_seqs": 8, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 64 << 20,
            "enable_prefix_caching": False, "disable_log_stats": False, "distributed_executor_backend": "uni",
            "worker_extension_cls": "kvloom_blend.vllm.RememberExtension", "seed": 0, **llm,
        }  # fmt: skip
        script, out, log = (self._folder / f"{name}-{self._count}" for name in ("script", "out", "log"))
        script.write_text(json.dumps({"llm": arguments, "kv": transfer, "do": list(do)}))
        code = self._warm.wait(self._warm.start([str(script), str(out)], env=env or {}, log=log), 400)
        printed = log.read_text()
        if fails:
            assert code, "it should not have started"
            return printed
        assert code == 0, printed[-6000:]
        return json.loads(out.read_text())


@pytest.fixture
def run(warm: Warm, tiny: Path, tmp_path: Path) -> Run:
    return Run(warm, tiny, tmp_path)


def tokens(seed: int, count: int) -> list[int]:
    """Token ids of the tiny model that follow from `seed`, none of them a separator."""
    return [(number * (2 * seed + 37) + 11 * seed + number // 7) % 500 + 3 for number in range(count)]
