"""`kvloom init`: what is written is a configuration, for every engine and tier."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_support import Done, run
from typer.testing import CliRunner

from kvloom import EngineConfig, Registry
from kvloom.cli.main import app
from kvloom.config import resolve
from kvloom_tools.verbs import init

SOME = ("memory:1GiB", "disk:/kv:2GiB", "redis://h:1", "s3://bucket/kv", "mooncake:h:1:1GiB")


def made(folder: Path, *arguments: str, status: int = 0) -> Done:
    return run("init", "--output", folder / "kv.yaml", *arguments, status=status)


def test_every_combination_of_engines_tiers_and_serializers_is_a_configuration() -> None:
    registry = Registry.discover()
    chosen = [some for count in (1, 2, 5) for some in itertools.combinations(SOME, count)]
    checked = 0
    for engine, tiers, serializer in itertools.product(init.ENGINES, chosen, ("raw", "cachegen", "torch")):
        if serializer != "raw" and tiers == SOME[:1]:
            continue
        tree = yaml.safe_load(init.written(engine, [init.tier_block(one) for one in tiers], serializer))
        config = EngineConfig.load(tree)
        if not init._missing(tree, serializer, registry):
            resolve(config, registry)
            checked += 1
    assert checked, "raw in memory, for `plain`, needs no package"


def test_flags_write_a_commented_file_that_is_checked(tmp_path: Path) -> None:
    done = made(tmp_path, "--engine", "plain", "--tier", "memory:64MiB", "--tier", f"disk:{tmp_path}/a b:1GiB")
    text = (tmp_path / "kv.yaml").read_text()
    assert yaml.safe_load(text) == {
        "connector": "plain",
        "tiers": [
            {"type": "memory", "capacity": "64MiB"}, {"type": "disk", "path": f"{tmp_path}/a b", "capacity": "1GiB"},
        ],
    }  # fmt: skip
    assert "# A directory; it outlives restarts." in text and len(text.splitlines()) < 12
    assert "kvloom config check" in done.out and "kvloom.Engine.open(" in done.out.splitlines()[-1]
    assert EngineConfig.from_file(tmp_path / "kv.yaml").tiers[1].capacity == 1 << 30


def test_for_vllm_the_next_step_is_its_command_line(tmp_path: Path) -> None:
    done = made(tmp_path, "--engine", "vllm", "--tier", "disk", "--serializer", "cachegen", "--json").json
    command = shlex.split(done["next"])
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert command[:2] == ["vllm", "serve"] and transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"] == {"config": str(tmp_path / "kv.yaml")}
    assert done["config"]["connector"] == "vllm_blob", "pages as they are cannot be packed with loss"
    sglang = made(
        tmp_path, "--engine", "sglang", "--tier", "disk", "--serializer", "cachegen", "--json", "--force"
    ).json
    assert sglang["config"]["tiers"][0]["serializer"] == {"type": "cachegen", "mode": "lossless"}


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("memory", {"type": "memory", "capacity": "4GiB"}),
        ("memory:1.5GB", {"type": "memory", "capacity": "1.5GB"}),
        ("disk:/a:b:10gib", {"type": "disk", "path": "/a:b", "capacity": "10gib"}),
        ("disk:5GiB", {"type": "disk", "path": "~/.cache/kvloom", "capacity": "5GiB"}),
        ("redis", {"type": "redis", "url": "redis://localhost:6379"}),
        ("redis:h:1", {"type": "redis", "url": "redis://h:1"}),
        ("rediss://h:1/2:3GiB", {"type": "redis", "url": "rediss://h:1/2", "capacity": "3GiB"}),
        ("redis:redis://h:1", {"type": "redis", "url": "redis://h:1"}),
        ("s3:bucket/x", {"type": "fsspec", "url": "s3://bucket/x"}),
        ("gs://bucket:1TiB", {"type": "fsspec", "url": "gs://bucket", "capacity": "1TiB"}),
        ("mooncake:h:50051:4GiB", {"type": "mooncake", "master": "h:50051", "segment": "4GiB"}),
    ],
)
def test_a_tier_is_a_word_a_place_and_a_size(text: str, block: dict[str, Any]) -> None:
    assert init.tier_block(text)[1] == block


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "--engine, --tier: there is no terminal to ask at; give both, such as --engine vllm --tier memory:4GiB"),
        (("--engine", "vllm"), "--engine, --tier: there is no terminal to ask at"),
        (("--engine", "vlm", "--tier", "memory"), "--engine: no engine 'vlm'; known: vllm, transformers"),
        (("--engine", "plain", "--tier", "tape"), "--tier: no tier 'tape'; known: memory, disk"),
        (("--engine", "plain", "--tier", "memory:lots"), "--tier: 'lots' is no size; write memory:4GiB"),
        (("--engine", "plain", "--tier", "redis://:pw@h:1"), "--tier: a redis URL has a login in it"),
        (("--engine", "plain", "--tier", "disk", "--tier", "memory"), "tiers.1.type: a memory tier cannot be here"),
        (("--engine", "plain", "--tier", "disk: "), "tiers.0.path: empty; name a directory"),
        (("--engine", "plain", "--tier", "memory", "--serializer", "torch"), "--serializer: memory keeps KV as it is"),
    ],
)
def test_what_cannot_be_is_one_error_and_no_file(arguments: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    done = made(tmp_path, *arguments, status=2)
    assert done.err.startswith(f"kvloom: {problem}") and "pw" not in done.err
    assert not (tmp_path / "kv.yaml").exists()


def test_a_file_is_written_over_only_if_asked(
    tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    flags = ("--engine", "plain", "--tier", "memory")
    (tmp_path / "kv.yaml").write_text("mine")
    assert "exists already" in made(tmp_path, *flags, status=2).err
    assert (tmp_path / "kv.yaml").read_text() == "mine"
    with full_disk():
        assert "kv.yaml cannot be written: File too large" in made(tmp_path, *flags, "--force", status=2).err
    assert (tmp_path / "kv.yaml").read_text() == "mine"
    made(tmp_path, *flags, "--force")
    assert EngineConfig.from_file(tmp_path / "kv.yaml").tiers[0].type == "memory"


def test_two_tiers_of_a_type_have_two_names(tmp_path: Path) -> None:
    made(tmp_path, "--engine", "plain", "--tier", f"disk:{tmp_path}/a", "--tier", f"disk:{tmp_path}/b")
    assert [tier.name for tier in EngineConfig.from_file(tmp_path / "kv.yaml").tiers] == ["disk", "disk-2"]


def test_what_is_not_installed_is_named(tmp_path: Path) -> None:
    done = made(tmp_path, "--engine", "plain", "--tier", "disk", "--serializer", "nosuch")
    assert "not usable yet: no serializer of type 'nosuch'" in done.err and (tmp_path / "kv.yaml").exists()


def test_on_a_terminal_it_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "_is_terminal", lambda: True)
    answers = ["plane", "plain", "memory", "1GiB", "disk", str(tmp_path), "much", "2GiB", "none"]
    done = CliRunner().invoke(app(), ["init", "-o", str(tmp_path / "kv.yaml")], input="\n".join([*answers, ""]))
    assert done.exit_code == 0, done.output
    first, second = EngineConfig.from_file(tmp_path / "kv.yaml").tiers
    assert (first.type, first.capacity, second.type, second.capacity) == ("memory", 1 << 30, "disk", 2 << 30)
    assert "no 'plane'" in done.stderr and "no 'much'" in done.stderr
