"""Input that cannot work: refused at once, by name, with what would be right."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from core_support import SPEC, Shelf
from pydantic import Field

from kvloom import ByteSize, Config, ConfigError, Engine, EngineConfig, KVSpec, Registry, hookimpl, validated
from kvloom.builtin.chunked import ChunkedTokenDatabase
from kvloom.builtin.plain import PlainConnector
from kvloom.config import resolve
from kvloom.types import DTYPES


def refused(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(source)
    return str(caught.value)


# -- the configuration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_", ["memory", "dict"])
@pytest.mark.parametrize(("capacity", "shown"), [("100000TiB", "97.7PiB"), (2**50 + 1, "1.0PiB"), ("9EiB", "9.0EiB")])
def test_an_absurd_capacity(type_: str, capacity: Any, shown: str) -> None:
    problem = refused({"tiers": [{"type": type_, "capacity": capacity}]})
    assert problem == f"tiers.0.capacity: should be at most 1PiB, not {shown}; check the unit"


@pytest.mark.parametrize("type_", ["memory", "dict"])
def test_a_size_of_hundreds_of_digits(type_: str) -> None:
    problems = refused({"tiers": [{"type": type_, "capacity": 10**400, "quota": {"a": 10**400}}]}).splitlines()
    assert problems == [
        "tiers.0.capacity: should be at most 1PiB; check the unit",
        "tiers.0.quota.a: should be at most 1PiB; check the unit",
    ]


@pytest.mark.parametrize("size", ["2PiB", 10**400, "1" + 400 * "0"], ids=["2PiB", "number", "text"])
def test_an_absurd_size_in_the_settings_of_a_plugin(size: Any) -> None:
    class Settings(Config):
        room: ByteSize = Field(ByteSize(1), ge=1)

    with pytest.raises(ConfigError, match="dict: room: should be at most 1PiB"):
        validated(Settings, {"room": size}, at="dict")
    assert validated(Settings, {"room": "1PiB"}, at="dict").room == 2**50


def test_the_largest_capacity() -> None:
    (tier,) = EngineConfig.load({"tiers": [{"type": "dict", "capacity": "1PiB"}]}).tiers
    assert tier.capacity == 2**50


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("tiers: &t [memory, *t]", "tiers.1"),
        ("tiers: [{type: dict, serializer: &s {type: raw, more: [*s]}}]", "tiers.0.serializer.more.0"),
        ("&all\nblend: *all", "blend.blend"),
    ],
)
def test_a_block_that_contains_itself(text: str, path: str, tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(text)
    assert refused(file) == f"{path}: an alias of a block that it is itself part of; write its settings out"


def test_a_block_that_is_used_twice_is_none_that_contains_itself(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("tiers: [{type: dict, serializer: &s {type: raw}}, {type: dict, name: two, serializer: *s}]")
    assert len(EngineConfig.load(file).tiers) == 2


def test_a_file_that_is_nested_too_deeply(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("tiers: " + "[" * 1000 + "]" * 1000)
    assert refused(file) == f"{file}: nested too deeply"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("9" * 5000, "line 1: a number of 5000 digits; write out what is meant"),
        ("2026-02-31", "not YAML: it has an impossible number or date"),
    ],
)
def test_a_number_that_is_none_does_not_blame_the_name_of_the_file(tmp_path: Path, value: str, problem: str) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(f"chunk_tokens: {value}")
    assert refused(file) == f"{file}: {problem}"


def test_the_name_of_a_file_that_can_be_none() -> None:
    assert refused("a\0b.yaml").startswith("'a\\x00b.yaml': cannot be read: ")
    assert refused("~no-such-user/a.yaml") == "~no-such-user/a.yaml: cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("source", "got"), [([1], "list"), (None, "nothing"), ("", "nothing"), (7, "int"), (b"engine.yaml", "bytes")]
)
def test_what_no_configuration_can_be_read_from(source: Any, got: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config: expected the path of a YAML .* got {got}$"):
        EngineConfig.load(source)


# -- two tiers on one store --------------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    module = ModuleType("made_here")
    module.kvloom_storage_backends = hookimpl(lambda: [Shelf])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_here", module)
    core = EntryPoint("builtin", "kvloom.builtin", "kvloom.v1")
    return Registry.discover(entry_points=[core, EntryPoint("made_here", "made_here", "kvloom.v1")])


def test_two_tiers_on_one_store(registry: Registry) -> None:
    one, two = {"type": "shelf", "shelf": "top"}, {"type": "shelf", "name": "cold", "shelf": "top", "capacity": "1MiB"}
    with pytest.raises(ConfigError) as caught:
        resolve(EngineConfig.load({"tiers": ["memory", one, "dict", two]}), registry)
    assert str(caught.value) == (
        "tiers.3: 'cold' would be on the same store as tiers.1, 'shelf'; give it other settings, or remove one"
    )


def test_two_tiers_of_one_type_on_stores_of_their_own(registry: Registry) -> None:
    shelves = [{"type": "shelf", "shelf": "top"}, {"type": "shelf", "name": "cold", "shelf": "bottom"}]
    dicts = ["dict", {"type": "dict", "name": "another"}]  # each keeps what it holds to itself
    assert len(resolve(EngineConfig.load({"tiers": [*shelves, *dicts]}), registry).tiers) == 4


def test_the_stores_that_cannot_be_opened_are_named_together(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Shelf] = []

    def check_writable(shelf: Shelf) -> None:
        if shelf.config.shelf != "whole":  # type: ignore[attr-defined]
            raise ValueError("shelf: is read-only")

    monkeypatch.setattr(Shelf, "check_writable", check_writable)
    monkeypatch.setattr(Shelf, "close", lambda shelf: closed.append(shelf))
    shelves = [{"type": "shelf", "name": name, "shelf": name} for name in ("one", "whole", "two")]
    with pytest.raises(ConfigError) as caught:
        Engine.open({"connector": "plain", "tiers": shelves}, SPEC, registry=registry)
    assert str(caught.value) == "tiers.0: shelf: is read-only\ntiers.2: shelf: is read-only"
    assert len(closed) == 3


def test_an_index_that_cannot_be_opened_leaves_nothing_open(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of another rank fail when the tiers are open already."""
    closed: list[Shelf] = []

    def make(tokens: object, config: object, spec: KVSpec) -> None:
        if spec.rank:
            raise ValueError("no more files")

    monkeypatch.setattr(ChunkedTokenDatabase, "__init__", make)
    monkeypatch.setattr(Shelf, "close", lambda shelf: closed.append(shelf))
    with pytest.raises(ConfigError, match="no more files"):
        Engine.open(
            {"connector": "plain", "tiers": [{"type": "shelf", "shelf": "top"}]},
            replace(SPEC, world_size=2),
            role="index",
            registry=registry,
        )
    assert len(closed) == 1


# -- the model and its KV ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["floaty", "float", "Tensor", "", "torch.bfloat16", None, ["float32"]])
def test_a_dtype_that_no_kv_has(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"^KVSpec\.dtype must be one of float64, .*, uint8, not "):
        KVSpec(model="m", num_layers=1, num_kv_heads=1, head_size=1, dtype=dtype)


def test_a_number_of_ranks_that_no_model_has() -> None:
    """As a record or a file of a spec may say: keys are made for each."""
    assert len(replace(SPEC, world_size=4096).other_ranks()) == 4095
    with pytest.raises(ValueError, match=r"KVSpec\.world_size must be at most 4096, not 1000000000"):
        replace(SPEC, world_size=10**9)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("rank", -1, "a whole number of at least 0, not -1"), ("rank", "0", "a whole number of at least 0, not '0'"),
        ("rank", 0.0, "a whole number of at least 0, not 0.0"), ("rank", False, "a whole number of at least 0, not F"),
        ("rank", 1 << 40, "a whole number of at least 0, not 1099511627776"),
        pytest.param("rank", 10**5000, "a whole number of at least 0, not a number of thousands", id="many digits"),
        ("kv_planes", True, "a whole number of at least 1, not True"), ("kv_planes", 3, "1 or 2, not 3"),
        ("kv_planes", 2.0, "a whole number of at least 1, not 2.0"), ("num_layers", True, "a whole number of at least"),
        ("kv_planes", torch.ones(2), "a whole number of at least 1, not tensor"),
        ("replicated", 1, "true or false, not"), ("adapters", "lora", "a list of strings, not 'lora'"),
        ("adapters", None, "a list of strings, not None"), ("adapters", [5], r"a list of strings, not \[5\]"),
        ("adapters", ["x"] * 99 + [5], r"a list of strings, not .*\.\.\."), ("rope", 5, "a mapping, not 5"),
        ("rope", [["a", 1]], "a mapping, not"), ("rope", {1: 2, "a": 3}, "what JSON can"),
    ],
)  # fmt: skip
def test_fields_of_other_types_are_named(field: str, value: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"^KVSpec\.{field} must be {problem}"):
        replace(SPEC, **{field: value})


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_one_of_torchs(dtype: str) -> None:
    spec = KVSpec(model="m", num_layers=1, num_kv_heads=1, head_size=1, dtype=dtype)
    assert str(spec.torch_dtype) == f"torch.{dtype}"


def test_a_dtype_is_checked_without_torch() -> None:
    code = "import sys, kvloom; kvloom.KVSpec('m', 1, 1, 1, 'float16'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kv", [None, 7, [torch.zeros(2, 2, 4, 8)], torch.zeros(2, 2, 4, 8).numpy()])
def test_kv_that_is_no_tensor(kv: Any) -> None:
    connector = PlainConnector(PlainConnector.Config(), SPEC)
    with pytest.raises(ValueError, match=rf"^kv: expected a tensor \[2, 2, >=4, 8\], got {type(kv).__name__}$"):
        connector.check({"kv": kv}, 4)
