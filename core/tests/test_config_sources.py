"""Sources of a configuration: files, `${env:NAME}` in them, and environment variables that override them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_support import SPEC, GiB, plugins_made_here, refused, unresolved
from hypothesis import given
from hypothesis import strategies as st

from kvloom import ConfigError, EngineConfig, Registry
from kvloom.config import resolve, sources
from kvloom.config.sources import interpolated


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    return plugins_made_here(monkeypatch)


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
        (
            "salt: a\nsalt: 3\nchunk_tokens: x\n",
            [
                "salt: given twice, in lines 1 and 2; remove one",
                "chunk_tokens: should be a whole number, not 'x'",
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
        ('salt: a\ntiers: [{type: disk, path: "\\uDCFF"}]\n', "line 2: half of a surrogate pair"),
        ('"\\uD800": 1\n', "line 1: half of a surrogate pair"),
        (f"salt: a\nchunk_tokens: 0x{'1' * 4000}\n", "line 2: a number of 4002 digits"),
        ("salt: a\nchunk_tokens: 1:1:1\n", "line 2: YAML takes digits with a colon as a number in base 60"),
        ("tiers: [{type: memory, capacity: 1:2.5}]\n", "line 1: YAML takes digits with a colon"),
    ],
)
def test_a_file_that_is_no_configuration_names_the_file(write: Any, text: str, problem: str) -> None:
    path = write(text)
    assert refused(path)[0].startswith(f"{path}: {problem}")


def test_a_variable_without_quotes_within_braces_is_told_to_have_them(write: Any) -> None:
    for text in ("tiers: [{type: redis, url: ${env:KV}}]", "tiers: [{type: redis, url: redis://${env:KV}:1}]"):
        with pytest.raises(ConfigError) as caught:
            EngineConfig.from_file(write(f"salt: a\n{text}\n"))
        assert "not YAML: line 2, column " in str(caught.value) and "\n" not in str(caught.value)
        assert str(caught.value).partition("put quotes round it: ")[2].startswith('"') and "${env:KV}" in str(
            caught.value
        )


def test_relative_paths_begin_where_the_file_is(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = EngineConfig.from_file(write(
        "tiers: [{type: disk, path: store}, {type: disk, name: b, path: /srv/kv}, {type: disk, name: c, path: ~/kv}]\n"
        "observers: [{type: trace, path: a/../trace.jsonl}]\n"
    ))  # fmt: skip
    resolved = resolve(config, Registry.discover())
    paths = [tier.backend.config.path for tier in resolved.tiers if tier.backend]
    assert paths == [tmp_path / "store", Path("/srv/kv"), Path("~/kv")]
    assert resolved.observers[0].config.path == tmp_path / "a/../trace.jsonl"


def test_the_home_of_a_user_who_is_not_known_is_an_error_like_any_other() -> None:
    config = EngineConfig.load({
        "tiers": [{"type": "dict", "protect": {"keys": "~nobody-at-all/k"}}],
        "observers": [{"type": "trace", "path": "~nobody-at-all/t"}],
        "tokens": {"type": "radix", "path": "~nobody-at-all"},
    })  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        resolve(config, Registry.discover())
    said = str(caught.value).splitlines()
    assert {line.partition(":")[0] for line in said} == {"tiers.0.protect.keys", "observers.0.path", "tokens.path"}
    assert all("unknown home directory" in line for line in said)


def test_relative_paths_of_the_shell_and_of_python_begin_in_the_working_directory(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("KVLOOM_TIERS__0__PATH", "store")
    monkeypatch.setenv("KVLOOM_TRACE", "trace.jsonl")
    file = EngineConfig.from_file(write("tiers: [{type: disk, path: other}]"))
    monkeypatch.delenv("KVLOOM_TIERS__0__PATH")
    for config in (file, EngineConfig.load({"tiers": [{"type": "disk", "path": Path("store")}]})):
        resolved = resolve(config, Registry.discover())
        assert resolved.tiers[0].backend.config.path == tmp_path / "elsewhere/store"
        assert resolved.observers[0].config.path == tmp_path / "elsewhere/trace.jsonl"


def test_keys_are_looked_for_where_the_file_is_and_an_error_names_the_place(write: Any, tmp_path: Path) -> None:
    config = EngineConfig.from_file(write("tiers: [{type: dict, protect: {keys: kv.key}}]"))
    with pytest.raises(ConfigError) as caught:
        resolve(config, Registry.discover())
    assert str(caught.value).startswith("tiers.0.protect.keys: ") and str(tmp_path / "kv.key") in str(caught.value)


def test_a_missing_file_names_the_file(tmp_path: Path) -> None:
    assert refused(tmp_path / "no.yaml") == [f"{tmp_path}/no.yaml: cannot be read: No such file or directory"]


def test_an_alias_bomb_is_read_in_no_time(write: Any) -> None:
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    assert "aliases stand for more than" in refused(write("salt: a\nsalt: b\n" + bomb))[0]
    ((key, problem),) = sources.repeated(yaml.compose("salt: a\nsalt: b\n" + bomb, Loader=yaml.SafeLoader))
    assert key == ("salt",) and problem.startswith("given twice")


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
    filled, templates, secrets, missing = interpolated({"a": [text.replace("${", "$${")]}, {})
    if "$${" not in text:  # that one needs its own escape
        assert filled == {"a": [text]}
    assert (templates, secrets, missing) == ({}, frozenset(), [])


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
        ("KVLOOM_TIERS__²__NAME", "x", "KVLOOM_TIERS__²__NAME: there is no number '²' in a list of 1"),
        ("KVLOOM_TIERS__X", "x", "KVLOOM_TIERS__X: there is no number 'x' in a list of 1"),
        ("KVLOOM_TIERS", "[" * 1000, "KVLOOM_TIERS: nested too deeply"),
        ("KVLOOM_CHUNK_TOKENS", "2026-13-45", "chunk_tokens: should be a whole number, not '2026-13-45'"),
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


# -- aliases -----------------------------------------------------------------------------------------------------------


def bomb(width: int = 9, depth: int = 9, *, merged: bool = False) -> str:
    """A few hundred bytes that stand for more than there is memory."""
    lines = ["a0: &a0 {x: 1}" if merged else f"a0: &a0 [{','.join('x' * width)}]"]
    for level in range(1, depth + 1):
        many = ",".join([f"*a{level - 1}"] * width)
        lines.append(f"a{level}: &a{level} {{<<: [{many}]}}" if merged else f"a{level}: &a{level} [{many}]")
    return "\n".join(lines)


def test_variables_that_are_wrong_are_listed_with_all_else(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOM_AAA", "1")
    monkeypatch.setenv("KVLOOM_TIERS__7__TTL", "1")
    text = "salt: 3\ntiers: [{type: dict, capacity: much}]\nplugins: {only: 3}\ntokens: nope\n"
    *found, last = refused(write(text))
    assert last.startswith("tokens.type: no tokens of type 'nope'; known: ")
    assert found == [
        "KVLOOM_AAA: no such setting; unset it",
        "KVLOOM_TIERS__7__TTL: there is no number '7' in a list of 1",
        "tiers.0.capacity: should be a size such as 512MiB or 20GiB, not 'much'",
        "salt: should be text",
        "plugins.only: should be a list, not 3",
    ]


@pytest.mark.parametrize(
    "text",
    [bomb(), bomb(merged=True, depth=30), f"a: &a '{'x' * 100_000}'\nb: [{','.join(['*a'] * 1000)}]", " " * (5 << 20)],
    ids=["lists", "merges", "texts", "length"],
)
def test_what_aliases_stand_for_is_bounded(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kv.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"kv\.yaml: .*(100000 values|characters)"):
        EngineConfig.load(path)
    *_, ((name, problem),) = sources.overridden({}, {"KVLOOM_TIERS": text}, defaults={"tiers": []})
    assert name == ("KVLOOM_TIERS",) and "write out what is meant" in problem


def test_aliases_are_as_good_as_what_they_stand_for(tmp_path: Path) -> None:
    path = tmp_path / "kv.yaml"
    path.write_text("connector: plain\ntiers: [&m {type: memory, capacity: 1MiB}, {<<: *m, name: other}]\n")
    assert sources.read(path)[0]["tiers"] == [
        {"type": "memory", "capacity": "1MiB"},
        {"type": "memory", "capacity": "1MiB", "name": "other"},
    ]
