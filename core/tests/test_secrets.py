"""Nothing that shows settings shows a password: not `repr`, not an error, not `kvloom config show`."""

from __future__ import annotations

import base64
import os
from typing import Any

import pytest
from core_support import SPEC, Shelf
from hypothesis import given
from hypothesis import strategies as st
from pydantic import model_validator

from kvloom import Config, ConfigError, Engine, EngineConfig, Registry
from kvloom.config import resolve
from kvloom.format.encryption import Protection
from kvloom.redaction import is_secret, looks_like_a_key, masked, masked_template

SECRET = "hunter2hunter2"
KEY = base64.b64encode(bytes(range(32))).decode()


def shown(config: Any) -> str:
    return f"{config!r} {config} {config.tiers!r} {config.tiers[-1]} {config.observers!r}"


@pytest.mark.parametrize(
    "settings",
    [
        {"password": SECRET},
        {"password": 987654321},
        {"password": [987654321]},
        {"sentinel_password": SECRET},
        {"session_token": SECRET},
        {"options": {"secret_access_key": SECRET}},
        {"options": {"nested": [{"credentials": {"anything": SECRET}}]}},
        {"url": f"redis://user:{SECRET}@host/0"},
        {"url": f"redis://{SECRET}@host/0"},
        {"options": {"endpoint": f"http://u:{SECRET}@host"}},
        {"endpoint": f"http://host/v1?anything={SECRET}"},
        {"protect": {"keys": KEY}},
        {"anything": KEY},
    ],
)
def test_blocks_do_not_show_secrets(settings: dict[str, Any]) -> None:
    text = shown(EngineConfig.load({"tiers": ["memory", {"type": "redis", **settings}]}))
    assert SECRET not in text and "987654321" not in text and KEY not in text and "***" in text


def test_blocks_do_not_show_what_came_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTHING", SECRET)
    config = EngineConfig.load(
        {
            "tiers": [
                {"type": "shelf", "label": "of ${env:ANYTHING}", "serializer": {"type": "raw", "x": "${env:ANYTHING}"}}
            ],
            "observers": [{"type": "log", "url": ["${env:ANYTHING}"]}],
            "blend": {"executor": "e", "retriever": {"type": "r", "y": "${env:ANYTHING}"}},
        }
    )  # fmt: skip
    assert SECRET not in shown(config) + repr(config.blend) + repr(config.tiers[0].serializer)  # type: ignore[union-attr]
    assert config.tiers[0].label == f"of {SECRET}", "it is there all the same"  # type: ignore[union-attr]


def test_the_salt_is_not_shown() -> None:
    config = EngineConfig.load({"salt": SECRET})
    assert SECRET not in repr(config) and SECRET not in str(config) and config.salt == SECRET
    assert "***" not in repr(EngineConfig.load({}))


def test_the_name_of_a_quota_says_nothing_of_its_size() -> None:
    assert masked({"quota": {"secret": "1MiB", "token": 7}}) == {"quota": {"secret": "1MiB", "token": 7}}


@pytest.mark.parametrize(
    "settings",
    [
        {"salt": [SECRET]},
        {"tiers": [{"type": "dict", "protect": SECRET}]},
        {"tiers": [{"type": "dict", "protect": {"keys": {"a": 5, "b": [SECRET]}}}]},
    ],
)
def test_errors_do_not_quote_salts_and_keys(settings: dict[str, Any], registry: Registry) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(EngineConfig.load({"connector": "plain", **settings}), registry)
    assert SECRET not in str(caught.value)


def test_settings_of_a_component_do_not_show_secrets() -> None:
    class Mine(Config):
        api_key: str = ""
        tokens: int = 3
        places: tuple[str, ...] = ()

    text = repr(Mine(api_key=SECRET, places=(f"http://a:{SECRET}@b/c",)))
    assert SECRET not in text and "tokens=3" in text and "http://***@b/c" in text


@pytest.mark.parametrize("value", [987654321, [SECRET], {"a": SECRET}, 1.5])
def test_errors_do_not_quote_a_password(value: Any, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    class Settings(Config):
        password: str
        label: str = ""

    monkeypatch.setattr(registry.get("backend", "shelf"), "Config", Settings)
    with pytest.raises(ConfigError) as caught:
        resolve(EngineConfig.load({"tiers": [{"type": "shelf", "password": value, "label": 77}]}), registry)
    assert str(caught.value).splitlines() == [
        "tiers.0.password: should be text",
        "tiers.0.label: should be text, not 77",
    ]


@pytest.mark.parametrize("place", [f"x://u:{SECRET}@host/0", f"x://{SECRET}@host/0", f"u:{SECRET}@host:1"])
def test_a_login_that_a_component_quotes_is_not_passed_on(
    place: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Settings(Config):
        place: str
        checked: bool = True

        @model_validator(mode="after")
        def _check(self) -> Settings:
            if self.checked:
                raise ValueError(f"{self.place!r} is no place, of example@host: a, b@c")
            return self

    def made(shelf: Shelf, config: Settings, spec: object = None) -> None:
        raise ValueError(f"no answer from {config.place}")

    monkeypatch.setattr(Shelf, "Config", Settings)
    monkeypatch.setattr(Shelf, "__init__", made)
    for checked, says in ((True, "host.*' is no place, of example@host: a, b@c"), (False, "no answer from .*host")):
        with pytest.raises(ConfigError, match=says) as caught:
            Engine.open({"tiers": [{"type": "shelf", "place": place, "checked": checked}]}, SPEC, registry=registry)
        assert SECRET not in str(caught.value) and "***@host" in str(caught.value)


def test_errors_about_a_block_do_not_quote_what_is_secret_in_it(registry: Registry) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({"tiers": [{"type": "shelf", "name": {"password": SECRET, "at": f"x://u:{SECRET}@h"}}]})
    assert SECRET not in str(caught.value) and "tiers.0.name" in str(caught.value)


def test_a_key_in_place_of_its_file_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="put it into a file") as caught:
        Protection.load("sign", KEY)
    assert KEY not in str(caught.value)


def test_a_key_that_nobody_drew_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for byte in (b"\0", b"\xff"):
        monkeypatch.setenv("KEYS", base64.b64encode(byte * 32).decode())
        with pytest.raises(ConfigError, match="line 1: not random"):
            Protection.load("sign", "env:KEYS")
    monkeypatch.setenv("KEYS", base64.b64encode(os.urandom(32)).decode())
    Protection.load("sign", "env:KEYS")


def test_what_is_no_secret_is_shown() -> None:
    plain = {"chunk_tokens": 1, "tokens": "radix", "tls_key": "/etc/key.pem", "token_file": "/t", "prefix": "kvloom:",
             "keys": "env:KEYS", "url": "s3://bucket/a@b", "skip_signature": True, "password": None}  # fmt: skip
    assert masked(plain) == plain


@pytest.mark.parametrize(
    ("name", "template", "text"),
    [
        ("password", "${env:PW}SECRET", "${env:PW}***"),
        ("password", "a${env:PW}b${env:B}", "***${env:PW}***${env:B}"),
        ("url", "redis://u:${env:PW}@h/0", "redis://u:${env:PW}@h/0"),
        ("url", "redis://u:x${env:PW}@h/0", "redis://u:***${env:PW}@h/0"),
        ("prefix", "of-${env:TEAM}:", "of-${env:TEAM}:"),
    ],
)
def test_what_stands_beside_an_interpolated_secret_is_a_part_of_it(name: str, template: str, text: str) -> None:
    assert masked_template(template, name) == text


@given(st.binary(min_size=32, max_size=32))
def test_keys_are_told_by_their_form(key: bytes) -> None:
    assert looks_like_a_key(base64.b64encode(key).decode())
    assert looks_like_a_key(base64.urlsafe_b64encode(key).decode())
    assert not looks_like_a_key("/etc/kvloom/" + base64.b64encode(key).decode())
    assert not is_secret(key) and not is_secret(3)
