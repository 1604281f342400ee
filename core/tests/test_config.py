"""Configuration: its shape, and every mistake with its path and its remedy."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import pytest
import yaml
from config_support import SPEC, GiB, Shelf, lines, plugins_made_here, refused, unresolved
from pydantic import TypeAdapter, ValidationError

from kvloom import Config, ConfigError, Duration, Engine, EngineConfig, Registry
from kvloom.config import Choice, resolve


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    return plugins_made_here(monkeypatch)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVLOOM_")]:
        monkeypatch.delenv(name)


# -- the shape ---------------------------------------------------------------------------------------------------------


def test_defaults(registry: Registry) -> None:
    resolved = resolve(EngineConfig.from_defaults(), registry)
    (memory,) = resolved.tiers
    assert (memory.name, memory.path, memory.backend, memory.capacity) == ("memory", "tiers.0", None, 5 * GiB)
    assert (resolved.tokens.type, resolved.connector.type) == ("chunked", "plain")
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
        ({"salt": 7}, "salt: should be text"),
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
        ({"tiers": [{"type": "memory", "capacity": "3foo"}]}, "tiers.0.capacity: should be a size such as 512MiB"),
        ({"tiers": [{"type": "memory", "quota": {}}]}, "tiers.0.quota: should not be empty"),
        ({"tiers": [{"type": "memory", "capacity": 0}]}, "tiers.0.capacity: should be more than nothing"),
        ({"tiers": [{"type": "memory", "capacity": True}]}, "tiers.0.capacity: should be a number, not true"),
        ({"tiers": [{"type": "memory", "path": "/x"}]}, "tiers.0.path: unknown key; known: capacity, deadline, name"),
        ({"tiers": [{"type": "memory", "serializer": "raw"}]}, "tiers.0.serializer: unknown key; known: capacity,"),
        ({"tiers": [{"type": "memory", "deadline": "3q"}]}, "tiers.0.deadline: not a duration: '3q'; write 250ms"),
        ({"tiers": [{"type": "memory", "deadline": float("inf")}]}, "tiers.0.deadline: should be a finite number"),
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


def test_a_mistake_hides_no_mistake_that_only_a_plugin_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    tree = {
        "tiers": [
            "memory",
            {"type": "dict", "capcity": "3GB", "ttl": "7days"},
            {"type": "dict", "name": "b", "serializer": {"type": "raw", "timed": 7, "level": 2}},
            {"type": "nowhere", "name": "${env:NOT_SET}", "write": "never"},
        ],
        "observers": [{"type": "log", "levl": 1}],
        "chunk_tokens": 0,
    }
    assert sorted(line.partition(": ")[0] for line in refused(tree)) == [
        "chunk_tokens", "observers.0.levl", "tiers.1.capcity", "tiers.1.ttl", "tiers.2.serializer.level",
        "tiers.2.serializer.timed", "tiers.3.name", "tiers.3.type",
    ]  # fmt: skip


def test_a_plugin_that_may_not_load_is_not_loaded_to_find_more_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Registry, "discover", lambda **settings: asked.append(settings) or Registry([]))
    refused({"chunk_tokens": 0, "tiers": ["dict"], "plugins": {"block": ["radix"]}})
    assert asked == [{"only": None, "block": ("radix",)}]


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
        {"type": "dict", "name": "other", "policy": "tiny_lfu", "capacity": 0, "quota": 7},
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


@pytest.mark.parametrize(
    ("setting", "place"),
    [({"quota": {"a": -1}}, "quota.a"), ({"protect": {"mode": "x"}}, "protect.keys"), ({"protect": {}}, "protect.keys")]
)  # fmt: skip
def test_no_mistake_in_a_block_hides_what_a_plugin_says_of_the_rest(setting: dict[str, Any], place: str) -> None:
    problems = refused({"tiers": [{"type": "dict", "nope": 1, "serializer": {"type": "raw", "levl": 1}, **setting}]})
    found = [problem.split(":")[0] for problem in problems]
    assert {f"tiers.0.{place}", "tiers.0.nope", "tiers.0.serializer.levl"} <= {*found}


def test_a_retriever_that_is_wrong_brings_no_complaints_about_another() -> None:
    problems = refused({"blend": {"retriever": {"typ": "x"}, "recompute_ratio": 0.5}})
    assert [problem.split(":")[0] for problem in problems] == ["blend.retriever.type"]


def test_what_is_wrong_by_itself_is_not_compared() -> None:
    """An invalid name or capacity is reported once, without further complaints about it."""
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
        "tiers.0.capacity: 1024 bytes is less than one chunk takes (8192 bytes)",
        "tiers.0.quota: 1 bytes for 'a' is less than one chunk takes (8192 bytes)",
        "tiers.0.quota: 2 bytes for 'b' is less than one chunk takes (8192 bytes)",
        "tiers.1.quota: 5 bytes for '*' is less than one chunk takes (12288 bytes)",
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
            "tokens.type: no tokens of type 'radix'; known: chunked; pip install ",
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
        (ValueError("path is not a directory"), "tiers.1: path is not a directory"),
        (PermissionError(13, "Permission denied", "/x"), "tiers.1: [Errno 13] Permission denied: '/x'"),
        (ConfigError("path", "not writable"), "tiers.1.path: not writable"),
        (ImportError("No module named 'redis'"), "tiers.1: No module named 'redis'"),
    ],
)
def test_a_constructor_that_refuses_is_a_config_error_with_the_path(fault: Exception, message: str) -> None:
    choice = Choice("tiers.1", "shelf", Shelf.Config(), lambda: Shelf)
    assert choice.make(SPEC).spec == SPEC
    with pytest.raises(ConfigError) as caught:
        choice.make(SPEC, fault=fault)
    assert str(caught.value) == message


def test_a_bug_in_a_constructor_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        Choice("tiers.1", "shelf", Shelf.Config(), lambda: Shelf).make(SPEC, fault=ZeroDivisionError())


# -- values ------------------------------------------------------------------------------------------------------------


def test_every_default_can_be_written_as_yaml() -> None:
    config = EngineConfig.load({"tiers": ["memory", "dict"], "blend": {}, "observers": ["log"]})
    assert EngineConfig.load(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "inf", "9" * 400 + "d"])
def test_a_setting_of_a_plugin_is_a_finite_number(value: Any) -> None:
    class Settings(Config):
        share: float = 0.5
        wait: Duration = 1.0

    for kind, name in ((Settings, "share"), (Settings, "wait"), (None, "")):
        with pytest.raises(ValidationError):
            TypeAdapter(Duration).validate_python(value) if kind is None else kind(**{name: value})
