"""`kvloom plan`: what it makes of a model, what it measures, and that it leaves nothing behind."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_support import CHUNK, Rack, blobs_in, fill, rack_installed, run
from clock_support import Hang
from hypothesis import given
from hypothesis import strategies as st

from kvloom import ConfigError, Registry
from kvloom_tools import vllm_groups
from kvloom_tools.shapes import quantity
from kvloom_tools.verbs.plan import Row, _compare, break_even

NUMBERS = ("--layers", 2, "--kv-heads", 2, "--head-size", 4)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text(
        f"chunk_tokens: {CHUNK}\n"
        f"tiers: [{{type: memory, capacity: 1MiB}}, {{type: disk, path: {tmp_path}/store, capacity: 100KiB}}]\n"
    )
    return path


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "rack.yaml"
    path.write_text(f"chunk_tokens: {CHUNK}\ntiers: [memory, {{type: rack, deadline: 20s}}]\n")
    with rack_installed(tmp_path):
        yield path


def plan(*arguments: object, status: int = 0) -> dict[str, Any]:
    return dict(run("plan", *arguments, "--json", status=status).json)


def store_of(config: Path) -> Path:
    return config.with_name("store")


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        (("--layers", 10**9, "--kv-heads", 10**9, "--head-size", 4), "kvloom: chunk_tokens: a chunk of this model has"),
        ((*NUMBERS, "--params", "1e300", "--flops", "1e-300"), "kvloom: --flops, --params: '0.0' should be a number"),
        ((*NUMBERS, "--params", "1e308", "--flops", "1"), "kvloom: --flops, --params: '0.0' should be a number"),
        ((*NUMBERS, "--params", "1e-300", "--flops", "1e300"), "kvloom: --flops, --params: 'inf' should be a number"),
    ],
)
def test_numbers_that_cannot_be_are_refused(config: Path, numbers: tuple[object, ...], problem: str) -> None:
    assert problem in run("plan", config, *numbers, status=2).err


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_what_the_tiers_can_do(config: Path) -> None:
    found = plan(config, *NUMBERS, "--prefill-tokens-per-second", 10)
    assert (found["chunk_tokens"], found["chunk_bytes"]) == (CHUNK, 2 * 2 * CHUNK * 8 * 2)
    memory, disk = found["tiers"]
    assert (memory["bytes_per_token"], memory["capacity_tokens"]) == (64, (1 << 20) // 4096 * CHUNK)
    assert disk["bytes_per_token"] == (4096 + 256) / CHUNK
    assert disk["capacity_tokens"] == 100 * 1024 // 8192 * CHUNK, "in whole pages, and whole chunks"
    for row in (memory, disk):
        assert row["tokens_per_second"] == pytest.approx(row["read_bytes_per_second"] / row["bytes_per_token"])
        assert row["latency_seconds"] > 0 and row["write_bytes_per_second"] > 0
        assert row["break_even_tokens"] == break_even(
            latency_seconds=row["latency_seconds"], seconds_per_token=1 / row["tokens_per_second"], prefill=10
        )
        assert row["break_even_tokens"] >= 1 and not row["error"]


def test_the_screen(config: Path) -> None:
    printed = run("plan", config, *NUMBERS).out
    assert "given: 64B a token, 256B a chunk of 4 tokens" in printed
    assert "recomputing: not known; nothing is measured of the model" in printed
    assert re.search(r"disk\s+48\s+\S+/s\s+\S+/s\s+\S+ \S+\s+[\d,]+\s+-\s", printed)


def test_a_tier_that_is_slower_than_recomputing_is_said_to_be(config: Path) -> None:
    printed = run("plan", config, *NUMBERS, "--params", "8", "--flops", "400P").out
    assert re.search(r"^disk: SLOWER THAN RECOMPUTING: it gives [\d,]+ tokens/s, the model computes 25,000,000,000,000",
                     printed, re.MULTILINE)  # fmt: skip
    assert re.search(r"disk\s.*\snever\s", printed)
    assert "recomputing: 25,000,000,000,000,000 tokens/s, estimated from --params and --flops" in printed
    given = plan(config, *NUMBERS, "--prefill-tokens-per-second", 10)
    assert (given["prefill_tokens_per_second"], given["prefill_is_estimated"]) == (10, False)
    assert "recomputing: 10 tokens/s, as given" in run("plan", config, *NUMBERS, "--prefill-tokens-per-second", 10).out
    assert plan(config, *NUMBERS, "--params", "8", "--flops", "400P")["prefill_is_estimated"]
    assert not store_of(config).exists(), "what was not there before is not there now"


def test_tiers_in_the_wrong_order(rack: Path) -> None:
    rack.write_text(f"chunk_tokens: {CHUNK}\ntiers: [{{type: rack}}, {{type: rack, name: fast, label: two}}]\n")
    Rack.before["one"] = lambda verb, key: time.sleep(0.02) if verb == "get" else None
    _, fast = plan(rack, *NUMBERS)["tiers"]
    assert fast["warnings"] == ["faster than 'rack', which is asked first: put it in front"]


def test_nothing_is_to_be_put_in_front_of_memory() -> None:
    """Memory comes first, or the configuration is refused."""
    rows = [Row("ram", "memory", None, tokens_per_second=1e3), Row("nvme", "disk", None, tokens_per_second=1e6)]
    _compare(rows)
    assert rows[1].warnings == ["faster than 'ram', which is asked first: measure again, or remove that tier"]


def test_a_tier_that_holds_less_than_a_chunk(config: Path) -> None:
    config.write_text(config.read_text().replace("100KiB", "6KiB"))
    disk = plan(config, *NUMBERS)["tiers"][1]
    assert (disk["capacity_tokens"], disk["warnings"]) == (
        0,
        ["its capacity is less than one chunk: it will hold nothing"],
    )


def test_other_serializers(config: Path) -> None:
    config.write_text(config.read_text().replace("100KiB", "100KiB, serializer: safetensors"))
    disk = plan(config, *NUMBERS)["tiers"][1]
    assert disk["bytes_per_token"] > 64 and not disk["error"]


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "int8", "uint8"])
def test_other_dtypes(config: Path, dtype: str) -> None:
    assert plan(config, *NUMBERS, "--dtype", dtype)["chunk_bytes"] == 2 * 2 * CHUNK * 8 * (4 if "32" in dtype else 1)


# -- what is left behind -----------------------------------------------------------------------------------------------


def test_nothing_is_left_and_nothing_else_is_touched(config: Path) -> None:
    fill(config, 3)
    root = store_of(config)

    def files() -> dict[Path, tuple[bytes, int]]:
        return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in root.rglob("*") if file.is_file()}

    before = files()
    plan(config, *NUMBERS)
    assert files() == before and len(blobs_in(root)) == 3
    assert not (root / "plan").exists()


def test_only_plan_is_written_to(rack: Path) -> None:
    fill(rack, 1)
    touched = set()
    Rack.before["one"] = lambda verb, key: touched.add(key) if verb in ("put", "delete", "get") else None
    before = dict(Rack.racks["one"])
    plan(rack, *NUMBERS)
    assert touched and all(key.startswith("plan/") for key in touched)
    assert Rack.racks["one"] == before


def test_what_a_killed_command_left_goes_after_an_hour(config: Path) -> None:
    cls = Registry.discover().get("backend", "disk")
    backend = cls(cls.Config(path=store_of(config)))
    for key in ("plan/old/0", "plan/new/0"):
        backend.put(key, [b"x"])
    (old,) = (path for path in store_of(config).glob("plan/old/*/0"))
    os.utime(old, (1, time.time() - 4000))
    plan(config, *NUMBERS)
    assert [entry.key for entry in backend.scan()] == ["plan/new/0"]


def test_a_tier_that_is_only_read_is_not_measured(rack: Path) -> None:
    rack.write_text(rack.read_text().replace("type: rack", "type: rack, write: never"))
    Rack.before["one"] = lambda verb, key: pytest.fail(verb)
    row = plan(rack, *NUMBERS)["tiers"][1]
    assert row["read_bytes_per_second"] is None and "write: never" in row["warnings"][0]


# -- stores that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["open", "put", "get", "delete", "scan"])
def test_a_store_that_hangs_does_not_hang_the_command(rack: Path, hang: Hang, verb: str) -> None:
    Rack.before["one"] = lambda at, key: hang(at, key) if at == verb else None
    found = plan(rack, *NUMBERS, status=1)
    memory, row = found["tiers"]
    assert memory["read_bytes_per_second"] > 0
    assert "DeadlineExceeded" in row["error"] and row["read_bytes_per_second"] is None


@pytest.mark.parametrize("verb", ["open", "put", "get", "delete"])
def test_a_store_that_fails(rack: Path, verb: str) -> None:
    def fail(at: str, key: str) -> None:
        if at == verb:
            raise OSError("Connection refused")

    Rack.before["one"] = fail
    done = run("plan", rack, *NUMBERS, status=1)
    assert re.search(r"^rack: not measured: .*Connection refused$", done.out, re.MULTILINE)
    if verb != "delete":
        assert not [key for key in Rack.racks["one"] if key.startswith("plan/")]


@pytest.mark.parametrize(
    ("damaged", "problem"),
    [
        (lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]), "byte 4096: payload checksum, buffer 0"),
        (lambda blob: blob[:-1], r"byte \d+: the blob is cut short"),
    ],
)
def test_a_store_that_damages_blobs(rack: Path, damaged: Callable[[bytes], bytes], problem: str) -> None:
    blobs = Rack.racks.setdefault("one", {})

    def damage(verb: str, key: str) -> None:
        if verb == "get":
            blobs[key] = damaged(blobs[key])

    Rack.before["one"] = damage
    row = plan(rack, *NUMBERS, status=1)["tiers"][1]
    assert re.fullmatch(f"CorruptBlobError: {problem}", row["error"])


def test_a_codec_that_does_not_take_the_models_kv(config: Path) -> None:
    pytest.importorskip("kvloom_serde_cachegen")
    text = config.read_text().replace("100KiB", "100KiB, serializer: {type: cachegen, mode: step}")
    config.write_text(text.replace(f"chunk_tokens: {CHUNK}", "chunk_tokens: 64"))
    memory, disk = plan(config, *NUMBERS, "--dtype", "uint8", status=1)["tiers"]
    assert "uint8" in disk["error"] and disk["tail_bytes"] is None and memory["tail_bytes"] and not memory["error"]


def test_a_store_that_cannot_be_written_to(config: Path) -> None:
    store_of(config).write_text("a file")
    row = plan(config, *NUMBERS, status=1)["tiers"][1]
    assert "cannot write to" in row["error"]


# -- the formula -------------------------------------------------------------------------------------------------------


def test_break_even_by_hand() -> None:
    assert break_even(latency_seconds=1.0, seconds_per_token=0.0, prefill=1e-320) == 0
    assert break_even(latency_seconds=1.0, seconds_per_token=0.0, prefill=1e308) is not None
    assert break_even(latency_seconds=1e10, seconds_per_token=0.0, prefill=1e308) is None
    assert break_even(latency_seconds=1.0, seconds_per_token=math.inf, prefill=1.0) is None
    # 10 ms, then 100,000 tokens/s, against 10,000 tokens/s: 0.01 / (1e-4 - 1e-5) = 111.1
    assert break_even(latency_seconds=0.01, seconds_per_token=1e-5, prefill=10_000) == 112
    assert break_even(latency_seconds=0.01, seconds_per_token=1e-4, prefill=10_000) is None
    assert break_even(latency_seconds=0.01, seconds_per_token=2e-4, prefill=10_000) is None


@given(st.floats(1e-6, 10), st.floats(1e-9, 1), st.floats(1, 1e6))
def test_from_the_break_even_on_loading_is_no_slower(latency: float, per_token: float, prefill: float) -> None:
    tokens = break_even(latency_seconds=latency, seconds_per_token=per_token, prefill=prefill)
    if tokens is None:
        assert per_token >= 1 / prefill
        return

    def gain(count: float) -> float:
        return count / prefill - (latency + count * per_token)

    rounding = 1e-9 * tokens / prefill
    assert gain(tokens) >= -rounding and (gain(tokens - 1) <= rounding)


def test_quantities() -> None:
    assert [quantity(text, "--x") for text in ("8B", "400T", "7.5e9", "1k", " 3 ")] == [8e9, 4e14, 7.5e9, 1e3, 3]
    for text in ("", "x", "8X", "-1", "0", "nan", "1e999", "BT"):
        with pytest.raises(ConfigError, match="--x: "):
            quantity(text, "--x")


def test_half_an_estimate_is_refused(config: Path) -> None:
    refused = run("plan", config, *NUMBERS, "--params", "8B", status=2).err
    assert refused == "kvloom: --flops, --params: give both\n"


def test_the_tail_of_a_prompt_is_said_with_what_it_takes(config: Path) -> None:
    """Of prompts that end 0, 16, 32 and 48 tokens behind their last chunk of 64 tokens."""
    config.write_text(config.read_text().replace(f"chunk_tokens: {CHUNK}", "chunk_tokens: 64"))
    found = plan(config, *NUMBERS)
    assert (found["tail_pieces"], found["most_tail_pieces"]) == (1.0, 2)
    sizes = [(tier["tail_bytes"], tier["most_tail_bytes"]) for tier in found["tiers"]]
    assert sizes == [(4096, 8192), (8192, 16384)], "of a page each, in a tier with one more for the header"
    printed = " ".join(run("plan", config, *NUMBERS).out.split())
    assert "a prompt leaves 1.0 pieces on average and 2 at most: memory 4KiB (at most 8KiB), disk 8KiB" in printed
    config.write_text(config.read_text().replace("chunk_tokens: 64", "chunk_tokens: 24"))
    assert plan(config, *NUMBERS)["tail_pieces"] == 8 / 24, "of 16 to 23 tokens"
    config.write_text(config.read_text() + "save_tails: false\n")
    found = plan(config, *NUMBERS)
    assert (found["most_tail_pieces"], found["tiers"][0]["tail_bytes"]) == (0, None)
    assert "a prompt leaves" not in run("plan", config, *NUMBERS).out


# -- by group, as vLLM divides a model ---------------------------------------------------------------------------------

ANSWER = """
import json, sys
from pathlib import Path
model, file, out = sys.argv[1:4]
spec = {"model": model, "num_layers": 2, "num_kv_heads": 2, "head_size": 4, "dtype": "float32"}
def group(kind, layers, page, state=False):
    geometry = {"layers": layers, "block_tokens": 4, "page_elements": page // 4}
    return {"kind": kind, "state": state, "parts": 1, "layers": layers, "block_tokens": 4, "chunk_tokens": 8,
            "page_bytes": page, "spec": {**spec, "num_layers": layers}, "geometry": geometry}
groups = [group("full attention", 2, 256), group("states", 1, 128, True), group("states", 1, 128, True)]
answers = {"tiny": {"groups": groups}, "refused": {"error": "KV cache of SinkSpec: write something else"}}
if model in answers:
    Path(out).write_text(json.dumps(answers[model]))
else:
    sys.exit("Killed")
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration; what is asked of vLLM is answered by a script."""
    (tmp_path / "answering.py").write_text(ANSWER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(vllm_groups, "_MODULE", "answering")
    monkeypatch.setattr(vllm_groups, "_NEEDED", ())
    path = tmp_path / "vllm.yaml"
    path.write_text("connector: vllm\nchunk_tokens: 8\ntiers: [{type: memory, capacity: 1MiB}]\n")
    return path


def test_groups_of_layers_are_told_and_tiers_hold_all_of_them(vllm: Path) -> None:
    found = plan(vllm, "--vllm", "tiny")
    assert [(group["kind"], group["bytes_per_token"]) for group in found["groups"]] == [
        ("full attention", 128), ("states", 32), ("states", 32),
    ]  # fmt: skip
    (memory,) = found["tiers"]
    assert found["chunk_bytes"] == 8 * 128, "the largest group is measured"
    assert memory["bytes_per_token"] == 192
    assert memory["capacity_tokens"] == int((1 << 20) // 4096 * 8 * 128 / 192)
    printed = run("plan", vllm, "--vllm", "tiny").out
    assert "192B in all" in re.sub(r"\s+", " ", printed) and "2 x states" in printed and "states: at most" in printed


@pytest.mark.parametrize(("model", "more", "problem"), [
    ("refused", (), "kvloom: --vllm: KV cache of SinkSpec: write something else"),
    ("other", (), "kvloom: --vllm: vLLM ended without an answer: Killed"),
    ("tiny", ("--layers", 2), "kvloom: --vllm: vLLM says what there is of the model"),
])  # fmt: skip
def test_what_vllm_does_not_take_is_said(vllm: Path, model: str, more: tuple[object, ...], problem: str) -> None:
    assert problem in run("plan", vllm, "--vllm", model, *more, status=2).err


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_says_so(config: Path) -> None:
    told = run("plan", config, "--vllm", "x", status=2).err
    assert "kvloom: --vllm: vllm is not installed here; pip install it" in told
