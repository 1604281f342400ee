"""Configuration: every way in, and every mistake with its path and its remedy."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import kvloom
from kvloom import ConfigError, Engine, EngineConfig, KVSpec, Registry, hookimpl
from kvloom.builtin.dict_backend import DictBackend
from kvloom.config import Choice, json_schema, resolve
from kvloom.config.sources import interpolated

GiB = 1 << 30
SPEC = KVSpec(model="tiny", num_layers=1, num_kv_heads=1, head_size=4, dtype="float32")


class Shelf(DictBackend):
    """A backend with a setting, and a constructor that can be made to raise."""

    type = "shelf"

    class Config(kvloom.Config):
        shelf: str = "default"

    def __init__(self, config: Any, spec: KVSpec | None = None, *, fault: BaseException | None = None) -> None:
        super().__init__(config, spec)
        self.spec = spec
        if fault:
            raise fault


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    module = ModuleType("made_here")
    module.kvloom_storage_backends = hookimpl(lambda: [Shelf])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_here", module)
    core = EntryPoint("builtin", "kvloom.builtin", "kvloom.v1")
    return Registry.discover(entry_points=[core, EntryPoint("made_here", "made_here", "kvloom.v1")])


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVLOOM_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "engine.yaml"
        path.write_text(text)
        return path

    return write


def lines(caught: pytest.ExceptionInfo[ConfigError]) -> list[str]:
    return str(caught.value).splitlines()


def refused(source: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(source)
    return lines(caught)


def unresolved(source: Any, registry: Registry) -> list[str]:
    config = EngineConfig.load(source)
    with pytest.raises(ConfigError) as caught:
        resolve(config, registry)
    return lines(caught)


# -- the shape ---------------------------------------------------------------------------------------------------------


def test_defaults(registry: Registry) -> None:
    resolved = resolve(EngineConfig.from_defaults(), registry)
    (memory,) = resolved.tiers
    assert (memory.name, memory.path, memory.backend, memory.capacity) == ("memory", "tiers.0", None, 5 * GiB)
    assert (resolved.tokens.cls.type, resolved.connector.cls.type) == ("chunked", "plain")
    assert (resolved.observers, resolved.blend) == ((), None)


def test_a_bare_word_is_a_block_with_that_type() -> None:
    words = EngineConfig.load({"connector": "plain", "tiers": ["memory", "dict"], "observers": ["log"]})
    blocks = EngineConfig.load(
        {
            "connector": {"type": "plain"},
            "tiers": [{"type": "memory"}, {"type": "dict", "serializer": "raw"}],
            "observers": [{"type": "log"}],
        }
    )
    assert words == blocks


def test_a_tier_is_resolved_with_core_and_plugin_keys_apart(registry: Registry) -> None:
    block = {
        "type": "shelf",
        "shelf": "top",
        "name": "cold",
        "capacity": "3MiB",
        "write": "on_evict",
        "deadline": "250ms",
        "serializer": {"type": "raw", "timed": True},
    }
    _, tier = resolve(EngineConfig.load({"tiers": ["memory", block]}), registry).tiers
    assert tier.backend is not None
    assert tier.serializer is not None
    assert tier.backend.config.model_dump() == {"shelf": "top"}
    assert tier.serializer.config.model_dump() == {}
    assert (tier.name, tier.path, tier.timed) == ("cold", "tiers.1", True)
    assert (tier.capacity, tier.write, tier.deadline) == (3 << 20, "on_evict", 0.25)


def test_a_config_and_what_it_resolves_to_are_frozen(registry: Registry) -> None:
    config = EngineConfig.from_defaults()
    with pytest.raises(ValueError, match="frozen"):
        config.salt = "x"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve(config, registry).tokens = None  # type: ignore[misc,assignment]


# -- mistakes that the core sees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ({"chunk_token": 1}, "chunk_token: unknown key; did you mean 'chunk_tokens'?"),
        ({"chunk_size": 1}, "chunk_size: unknown key; LMCache's chunk_size is 'chunk_tokens' here"),
        ({"chunk_tokens": "many"}, "chunk_tokens: should be a whole number, not 'many'"),
        ({"chunk_tokens": 1.5}, "chunk_tokens: should be a whole number, not 1.5"),
        ({"chunk_tokens": True}, "chunk_tokens: should be a number, not true"),
        ({"chunk_tokens": 0}, "chunk_tokens: should be greater than or equal to 1, not 0"),
        ({"salt": 7}, "salt: should be text, not 7"),
        ({"instance_id": ""}, "instance_id: should have at least 1 character, not ''"),
        ({"exact": "perhaps"}, "exact: should be true or false, not 'perhaps'"),
        ({"connector": None}, "connector: should be a block of settings, not empty"),
        ({"connector": {"kind": "plain"}}, "connector.type: missing; it has no default"),
        ({"connector": {"type": 3}}, "connector.type: should be text, not 3"),
        ({"observers": "log"}, "observers: should be a list, not 'log'"),
        ({"plugins": {"onyl": []}}, "plugins.onyl: unknown key; did you mean 'only'?"),
        ({"plugins": {"only": "builtin"}}, "plugins.only: should be a list, not 'builtin'"),
        ({"tiers": []}, "tiers: at least one tier is needed, such as [memory]"),
        ({"tiers": {"type": "memory"}}, "tiers: should be a list, not {'type': 'memory'}"),
        ({"tiers": [{"capacity": 1}]}, "tiers.0.type: missing; it has no default"),
        ({"tiers": [{"type": "memory", "capacity": "lots"}]}, "tiers.0.capacity: should be a size such as 512MiB"),
        ({"tiers": [{"type": "memory", "capacity": 0}]}, "tiers.0.capacity: should be more than nothing"),
        ({"tiers": [{"type": "memory", "capacity": True}]}, "tiers.0.capacity: should be a number, not true"),
        ({"tiers": [{"type": "memory", "path": "/x"}]}, "tiers.0.path: unknown key; known: capacity, deadline, name"),
        ({"tiers": [{"type": "memory", "serializer": "raw"}]}, "tiers.0.serializer: unknown key; known: capacity,"),
        ({"tiers": [{"type": "memory", "deadline": "3q"}]}, "tiers.0.deadline: not a duration: '3q'; write 250ms"),
        ({"tiers": [{"type": "memory", "deadline": float("inf")}]}, "tiers.0.deadline: should be more than nothing"),
        ({"tiers": ["memory", "memory"]}, "tiers.1.type: a memory tier cannot be here: there is one already"),
        ({"tiers": ["dict", "memory"]}, "tiers.1.type: a memory tier cannot be here: it must come first"),
        ({"tiers": ["dict", "dict"]}, "tiers.1.name: tiers.0 is called 'dict' too; set another `name`"),
        ({"tiers": [{"type": "dict", "name": "a b"}]}, "tiers.0.name: should match pattern"),
        ({"tiers": [{"type": "dict", "write": "on_evict"}]}, "tiers.0.write: 'on_evict' writes what the memory"),
        (
            {"tiers": [{"type": "dict", "write": "back"}]},
            "tiers.0.write: should be 'through', 'on_evict' or 'never', not",
        ),
        (
            {"tiers": [{"type": "dict", "write": "never", "capacity": "1GiB"}]},
            "tiers.0.capacity: a tier with `write: never` is only read; those who fill it set its bounds; remove it",
        ),
        ({"tiers": [{"type": "dict", "ttl": 1e12}]}, "tiers.0.ttl: should be at most ten years, not 1000000000000"),
        (
            {"tiers": [{"type": "dict", "ttl": "-6h"}]},
            "tiers.0.ttl: should be more than nothing and finite, not -21600",
        ),
        ({"tiers": [{"type": "dict", "ttl": -1}]}, "tiers.0.ttl: should be more than nothing and finite, not -1"),
        ({"tiers": [{"type": "memory", "ttl": 0}]}, "tiers.0.ttl: should be more than nothing"),
        ({"tiers": [{"type": "dict", "deadline": 0}]}, "tiers.0.deadline: should be more than nothing"),
        ({"tiers": [{"type": "dict", "policy": "fifo"}]}, "tiers.0.policy: should be 'lru' or 'tiny_lfu', not 'fifo'"),
        (
            {"tiers": [{"type": "dict", "policy": "tiny_lfu"}]},
            "tiers.0.policy: 'tiny_lfu' decides what a full tier takes",
        ),
        (
            {"tiers": [{"type": "dict", "quota": 1}]},
            "tiers.0.quota: a quota is a part of the tier's capacity, which is",
        ),
        (
            {"tiers": [{"type": "dict", "capacity": "1GiB", "quota": "2GiB"}]},
            "tiers.0.quota: 2.0GiB for '*' is more than the tier's capacity (1.0GiB); lower it",
        ),
        (
            {"tiers": [{"type": "memory", "capacity": "1GiB", "quota": {"*": 1, "team": "1.5GiB"}}]},
            "tiers.0.quota: 1.5GiB for 'team' is more than the tier's capacity (1.0GiB); lower it",
        ),
        (
            {"tiers": [{"type": "dict", "capacity": 9, "quota": {"a": 0}}]},
            "tiers.0.quota.a: should be more than nothing",
        ),
        ({"tiers": [{"type": "dict", "capacity": 9, "quota": {}}]}, "tiers.0.quota: "),
        ({"tiers": [{"type": "dict", "serializer": 3}]}, "tiers.0.serializer: should be a block of settings, not 3"),
        ({"tiers": [{"type": "dict", "serializer": {"type": "raw", "timed": 7}}]}, "tiers.0.serializer.timed: "),
        ({"blend": {"executor": 1}}, "blend.executor: should be text, not 1"),
        ({3: 4}, "3: "),
    ],
)
def test_the_core_says_where_and_what(source: Any, line: str) -> None:
    (problem,) = refused(source)
    assert problem.startswith(line)


def test_all_mistakes_are_listed_with_their_paths() -> None:
    problems = refused({"salt": 1, "tiers": [{"type": "memory", "capacity": "x"}, {"type": "dict", "ttl": 0}], "x": 1})
    assert [problem.split(":")[0] for problem in problems] == ["tiers.0.capacity", "tiers.1.ttl", "salt", "x"]


@pytest.mark.parametrize("other", [{}, {"salt": 1}, {"x": 1}])
def test_no_mistake_hides_what_other_settings_say_against_each_other(other: dict[str, Any]) -> None:
    tiers = [
        {"type": "memory", "capacity": "1GiB", "quota": {"a": "2GiB", "b": "3GiB"}, "ttl": 0},
        {"type": "dict", "policy": "tiny_lfu", "quota": 1},
        {"type": "dict", "write": "never", "capacity": 9, "quota": 1},
        {"type": "memory", "capacity": 1, "quota": 2},
        {"capacity": 1},
        {"type": "disk", "policy": "tiny_lfu", "capacity": 0, "quota": 7},
    ]
    problems = refused({"tiers": tiers, **other})
    assert sorted(problem.split(";")[0] for problem in problems if problem.startswith("tiers")) == [
        "tiers.0.quota: 2.0GiB for 'a' is more than the tier's capacity (1.0GiB)",
        "tiers.0.quota: 3.0GiB for 'b' is more than the tier's capacity (1.0GiB)",
        "tiers.0.ttl: should be more than nothing and finite, not 0.0",
        "tiers.1.policy: 'tiny_lfu' decides what a full tier takes in",
        "tiers.1.quota: a quota is a part of the tier's capacity, which is not set",
        "tiers.2.capacity: a tier with `write: never` is only read",
        "tiers.2.name: tiers.1 is called 'dict' too",
        "tiers.2.quota: a tier with `write: never` is only read",
        "tiers.3.quota: 2B for '*' is more than the tier's capacity (1B)",
        "tiers.3.type: a memory tier cannot be here: there is one already",
        "tiers.4.type: missing",
        "tiers.5.capacity: should be more than nothing and finite, not 0",
    ]
    assert len(problems) == 12 + len(other)


def test_what_is_wrong_by_itself_is_not_compared() -> None:
    """Of a name or a capacity that is not understood nobody knows whether it would be fine."""
    tiers = ["dict", {"type": "dict", "name": "a b"}, {"type": "dict", "name": "c", "write": "on_evict"}]
    assert [problem.split(":")[0] for problem in refused({"tiers": [{"typ": "memory"}, *tiers]})] == [
        "tiers.0.type", "tiers.2.name",
    ]  # fmt: skip


def test_all_that_is_too_small_for_a_chunk_is_listed() -> None:
    tiers = [
        {"type": "memory", "capacity": "1KiB", "quota": {"a": 1, "b": 2}},
        {"type": "dict", "capacity": "1GiB", "quota": 5},
    ]
    with pytest.raises(ConfigError) as caught:
        Engine.open({"tiers": tiers, "connector": "plain"}, SPEC)
    assert [line.split(";")[0] for line in lines(caught)] == [
        "tiers.0.capacity: 1024 bytes is less than one chunk (8192 bytes)",
        "tiers.0.quota: 1 bytes for 'a' is less than one chunk (8192 bytes)",
        "tiers.0.quota: 2 bytes for 'b' is less than one chunk (8192 bytes)",
        "tiers.1.quota: 5 bytes for '*' is less than one chunk (8192 bytes)",
    ]


# -- mistakes that only plugins can see --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ({"tiers": [{"type": "shelf", "shel": 1}]}, "tiers.0.shel: unknown key; did you mean 'shelf'?"),
        ({"tiers": [{"type": "shelf", "capcity": 1}]}, "tiers.0.capcity: unknown key; did you mean 'capacity'?"),
        ({"tiers": [{"type": "shelf", "shelf": 3}]}, "tiers.0.shelf: should be text, not 3"),
        ({"tiers": ["memory", "redis"]}, "tiers.1.type: no backend of type 'redis'; known: dict, shelf; pip install"),
        ({"tiers": [{"type": "dict", "serializer": "xz"}]}, "tiers.0.serializer.type: no serializer of type 'xz'"),
        ({"connector": "plane"}, "connector.type: no connector of type 'plane'; known: plain; did you mean 'plain'?"),
        ({"connector": {"type": "plain", "page": 1}}, "connector.page: unknown key; known: type"),
        (
            {"tokens": "radix"},
            "tokens.type: no tokens of type 'radix'; known: chunked; pip install kvloom-tokens-radix",
        ),
        ({"observers": ["log", {"type": "log", "level": "loud"}]}, "observers.1.level: should be 'debug', 'info'"),
        ({"plugins": {"only": ["bultin"]}}, "plugins.only.0: no plugin 'bultin' is installed; there are: builtin,"),
    ],
)
def test_the_plugins_say_where_and_what(source: Any, line: str, registry: Registry) -> None:
    (problem,) = unresolved(source, registry)
    assert problem.startswith(line)


def test_what_blending_needs_is_named_at_its_own_paths(registry: Registry) -> None:
    problems = unresolved({"blend": "cacheblend"}, registry)
    assert problems[0].startswith("blend.executor: no blend executor of type 'cacheblend'")
    assert problems[1].startswith("blend.retriever.type: no blend retriever of type 'separator'")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (ValueError("path is no directory"), "tiers.1: path is no directory"),
        (PermissionError(13, "Permission denied", "/x"), "tiers.1: [Errno 13] Permission denied: '/x'"),
        (ConfigError("path", "not writable"), "tiers.1.path: not writable"),
        (ImportError("No module named 'redis'"), "tiers.1: No module named 'redis'"),
    ],
)
def test_a_constructor_that_refuses_is_a_config_error_with_the_path(fault: Exception, message: str) -> None:
    choice = Choice("tiers.1", Shelf, Shelf.Config())
    assert choice.make(SPEC).spec == SPEC
    with pytest.raises(ConfigError) as caught:
        choice.make(SPEC, fault=fault)
    assert str(caught.value) == message


def test_a_bug_in_a_constructor_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        Choice("tiers.1", Shelf, Shelf.Config()).make(SPEC, fault=ZeroDivisionError())


# -- files -------------------------------------------------------------------------------------------------------------


def test_from_file(write: Any) -> None:
    config = EngineConfig.from_file(write("chunk_tokens: 16\ntiers: [{type: memory, capacity: 2GiB}]\n"))
    assert config == EngineConfig.from_defaults(chunk_tokens=16, tiers=[{"type": "memory", "capacity": 2 * GiB}])
    assert EngineConfig.load(str(write("salt: a"))) == EngineConfig.load({"salt": "a"})
    assert EngineConfig.from_file(write("")) == EngineConfig.from_defaults()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("salt: a\nsalt: b\n", ["salt: given twice, in lines 1 and 2; remove one"]),
        (
            "tiers:\n- type: memory\n- {type: dict, name: x, type: dict, name: y}\n",
            [
                "tiers.1.type: given twice, in lines 3 and 3; remove one",
                "tiers.1.name: given twice, in lines 3 and 3; remove one",
            ],
        ),
    ],
)
def test_a_key_given_twice_is_refused(write: Any, text: str, problem: list[str]) -> None:
    assert refused(write(text)) == problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tiers: [", "not YAML: "),
        ("- a\n", "should hold settings such as"),
        ("a: !!python/object:x.y {}", "not YAML: "),
    ],
)
def test_a_file_that_is_no_configuration_names_the_file(write: Any, text: str, problem: str) -> None:
    path = write(text)
    assert refused(path)[0].startswith(f"{path}: {problem}")


def test_a_missing_file_names_the_file(tmp_path: Path) -> None:
    assert refused(tmp_path / "no.yaml") == [f"{tmp_path}/no.yaml: cannot be read: No such file or directory"]


def test_an_alias_bomb_is_read_in_no_time(write: Any) -> None:
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    assert refused(write("salt: a\nsalt: b\n" + bomb))[0].startswith("salt: given twice")


# -- ${env:NAME} -------------------------------------------------------------------------------------------------------


def test_interpolation(write: Any, monkeypatch: pytest.MonkeyPatch, registry: Registry) -> None:
    monkeypatch.setenv("ROOM", "north")
    monkeypatch.setenv("SIZE", "3MiB")
    path = write("tiers: [{type: shelf, shelf: 'a-${env:ROOM}-$${env:ROOM}', capacity: '${env:SIZE}'}]")
    (tier,) = resolve(EngineConfig.from_file(path), registry).tiers
    assert tier.backend is not None
    assert tier.backend.config.model_dump() == {"shelf": "a-north-${env:ROOM}"}
    assert tier.capacity == 3 << 20


def test_what_cannot_be_interpolated_is_named() -> None:
    source = {
        "salt": "${env:NOT_SET_HERE}",
        "tiers": [{"type": "redis", "url": "redis://${PASSWORD}@x"}, {"type": "dict", "name": "${env:open"}],
    }
    assert refused(source) == [
        "salt: the environment variable NOT_SET_HERE is not set",
        "tiers.0.url: cannot fill in ${PASSWORD}; write ${env:NAME}, or $${ for a plain ${",
        "tiers.1.name: cannot fill in ${env:open; write ${env:NAME}, or $${ for a plain ${",
    ]


@given(st.text())
def test_any_text_can_be_written(text: str) -> None:
    filled, templates, secrets = interpolated({"a": [text.replace("${", "$${")]}, {})
    if "$${" not in text:  # that one needs its own escape
        assert filled == {"a": [text]}
    assert (templates, secrets) == ({}, frozenset())


def test_an_interpolated_value_is_in_no_error(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> None:
    monkeypatch.setenv("PASSWORD", "hunter2hunter2")
    assert refused({"tiers": [{"type": "dict", "capacity": "${env:PASSWORD}"}]}) == [
        "tiers.0.capacity: should be a size such as 512MiB or 20GiB, not '***'"
    ]
    assert "hunter2" not in str(unresolved({"tiers": [{"type": "shelf", "x": "${env:PASSWORD}"}]}, registry))
    config = EngineConfig.load({"tiers": [{"type": "shelf", "shelf": "${env:PASSWORD}"}]})
    (tier,) = resolve(config, registry).tiers
    assert tier.backend is not None
    with pytest.raises(ConfigError) as caught:
        tier.backend.make(SPEC, fault=OSError("cannot reach hunter2hunter2@host"))
    assert str(caught.value) == "tiers.0: cannot reach ***@host"


# -- the environment ---------------------------------------------------------------------------------------------------


def test_from_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOM_CHUNK_TOKENS", "512")
    monkeypatch.setenv("KVLOOM_SALT", "0123")
    monkeypatch.setenv("KVLOOM_EXACT", "true")
    monkeypatch.setenv("KVLOOM_TIERS", "[{type: memory, capacity: 1GiB}, {type: dict}]")
    monkeypatch.setenv("KVLOOM_TIERS__1__CAPACITY", "10GiB")
    monkeypatch.setenv("KVLOOM_TIERS__1__SERIALIZER__TIMED", "true")
    monkeypatch.setenv("KVLOOM_PLUGINS__BLOCK", "[shelf]")
    assert EngineConfig.from_env() == EngineConfig.from_defaults(
        chunk_tokens=512,
        salt="0123",
        exact=True,
        tiers=[
            {"type": "memory", "capacity": GiB},
            {"type": "dict", "capacity": 10 * GiB, "serializer": {"type": "raw", "timed": True}},
        ],
        plugins={"block": ["shelf"]},
    )


def test_the_environment_reaches_into_defaults_and_bare_words(monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    monkeypatch.setenv("KVLOOM_TIERS__0__CAPACITY", "1GiB")
    monkeypatch.setenv("KVLOOM_BLEND__RECOMPUTE_RATIO", "0.5")
    monkeypatch.setenv("KVLOOM_CONNECTOR__PAGE", "7")
    config = EngineConfig.from_file(write("tiers: [memory]\nconnector: plain\n"))
    assert config == EngineConfig.from_env()
    assert config.tiers[0].capacity == GiB
    assert config.blend is not None
    assert config.blend.settings == {"recompute_ratio": 0.5}
    assert (config.connector.type, config.connector.settings) == ("plain", {"page": 7})


def test_the_environment_is_above_the_file_and_below_nothing_else(monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    monkeypatch.setenv("KVLOOM_SALT", "env")
    assert EngineConfig.from_file(write("salt: file")).salt == "env"
    assert EngineConfig.load({"salt": "code"}).salt == "code"
    assert EngineConfig.from_defaults(salt="code").salt == "code"


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("KVLOOM_CHUNK_TOKEN", "1", "KVLOOM_CHUNK_TOKEN: no such setting; did you mean KVLOOM_CHUNK_TOKENS?"),
        ("KVLOOM_CHUNK_SIZE", "1", "KVLOOM_CHUNK_SIZE: no such setting; LMCache's chunk_size is 'chunk_tokens' here"),
        ("KVLOOM_ZZZ", "1", "KVLOOM_ZZZ: no such setting; unset it"),
        ("KVLOOM_TIERS__4__NAME", "x", "KVLOOM_TIERS__4__NAME: there is no number '4' in a list of 1"),
        ("KVLOOM_TIERS__X", "x", "KVLOOM_TIERS__X: there is no number 'x' in a list of 1"),
        ("KVLOOM_CHUNK_TOKENS__X", "x", "KVLOOM_CHUNK_TOKENS__X: there is nothing to set 'x' in: 256"),
        (
            "KVLOOM_CHUNK_TOKENS",
            "few",
            "chunk_tokens: should be a whole number, not 'few' (set by KVLOOM_CHUNK_TOKENS)",
        ),
        (
            "KVLOOM_TIERS__0__CAPACITY",
            "few",
            "tiers.0.capacity: should be a size such as 512MiB or 20GiB, not 'few' (s",
        ),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, line: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_env()
    assert str(caught.value).startswith(line)


# -- for editors -------------------------------------------------------------------------------------------------------


def test_the_schema_is_closed_over_what_is_installed(registry: Registry) -> None:
    schema = json_schema(registry)
    json.dumps(schema)
    words, blocks = schema["properties"]["tiers"]["items"]["anyOf"]
    assert words["enum"] == ["memory", "dict", "shelf"]
    assert set(blocks["discriminator"]["mapping"]) == {"memory", "dict", "shelf"}
    shelf = schema["$defs"]["Shelf"]
    assert shelf["additionalProperties"] is False
    assert {"shelf", "capacity", "serializer", "write", "deadline", "name", "type"} <= set(shelf["properties"])
    assert shelf["properties"]["type"]["const"] == "shelf"
    assert {"type": "string"} in shelf["properties"]["deadline"]["anyOf"], "30s"
    assert schema["properties"]["blend"]["type"] == "null", "nothing is installed that blends"


def test_what_the_schema_lists_is_what_the_config_has(registry: Registry) -> None:
    assert set(json_schema(registry)["properties"]) == set(EngineConfig.model_fields)


def test_every_default_can_be_written_as_yaml() -> None:
    config = EngineConfig.load({"tiers": ["memory", "dict"], "blend": {}, "observers": ["log"]})
    assert EngineConfig.load(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config
