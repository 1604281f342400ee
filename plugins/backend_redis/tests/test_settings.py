"""Settings: valid ones, the errors for others, and no password in any text."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pydantic
import pytest

from kvloom import ConfigError, EngineConfig, Registry
from kvloom.config import resolve
from kvloom_backend_redis import opening
from kvloom_backend_redis.address import Address, Endpoint, parse
from kvloom_backend_redis.backend import RedisBackend
from kvloom_backend_redis.config import RedisConfig

SECRET = "s3cr3t-p4ss"
LOCAL = "redis://localhost"


def test_it_is_found_by_its_entry_point() -> None:
    assert Registry.discover().get("backend", RedisBackend.type) is RedisBackend
    assert (RedisBackend.type, RedisBackend.persistent, RedisBackend.shared, RedisBackend.bounded) == (
        "redis",
        True,
        True,
        True,
    )


def test_the_hook_connects_to_nothing_and_imports_no_torch() -> None:
    code = "import sys, kvloom_backend_redis.backend; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://a", Address("single", False, (Endpoint("a", 6379),))),
        ("redis://a:1/2", Address("single", False, (Endpoint("a", 1),), 2)),
        ("rediss://[::1]:1/", Address("single", True, (Endpoint("::1", 1),))),
        ("redis://[::1]", Address("single", False, (Endpoint("::1", 6379),))),
        ("redis://:p%40%2f@a", Address("single", False, (Endpoint("a", 6379),), password="p@/")),
        ("redis://u:p:q@a", Address("single", False, (Endpoint("a", 6379),), username="u", password="p:q")),
        ("unix:///a/b.sock", Address("single", False, (Endpoint("/a/b.sock", 0),))),
        ("unix://u:p@/a%20b?db=7", Address("single", False, (Endpoint("/a b", 0),), 7, "", "u", "p")),
        (
            "redis+sentinel://a,b:3/svc/4",
            Address("sentinel", False, (Endpoint("a", 26379), Endpoint("b", 3)), 4, "svc"),
        ),
        ("rediss+cluster://a:1,b:2", Address("cluster", True, (Endpoint("a", 1), Endpoint("b", 2)))),
        ("redis+cluster://a/0", Address("cluster", False, (Endpoint("a", 6379),))),
    ],
)
def test_urls(url: str, address: Address) -> None:
    assert parse(url) == address


BAD = {
    "": "has no scheme; write one of redis://",
    "localhost:6379": "has no scheme",
    "http://a": "does not know the scheme 'http'; write one of",
    "redis://": "names no server",
    "redis://a:0": "not a number from 1 to 65535",
    "redis://a:65536": "not a number from 1 to 65535",
    "redis://a:b": "not a number from 1 to 65535",
    "redis://::1": "names no server, or its port",
    "redis://[::1": "is not a URL",
    "redis://a/x": "names a database that is not a number",
    "redis://a/-1": "names a database that is not a number",
    "redis://a/1/2": "has an unexpected path",
    "redis://a?ssl=1": "has settings behind a '?'",
    "redis://a#b": "has a '#' in it",
    "redis://a,b": "names several servers; write redis+sentinel://",
    "redis+sentinel://a": "names no service of the Sentinels",
    "redis+cluster://a/1": "has an unexpected path",
    "unix://": "by its absolute path",
    "unix://run/a.sock": "by its absolute path",
    "unix:///a?dd=1": "by its absolute path",
}


@pytest.mark.parametrize(("url", "problem"), BAD.items())
def test_urls_that_mean_nothing_are_refused_where_they_stand(url: str, problem: str) -> None:
    config = EngineConfig.load({"tiers": ["memory", {"type": "redis", "url": url}]})
    with pytest.raises(ConfigError) as caught:
        resolve(config, Registry.discover())
    assert str(caught.value).startswith("tiers.1.url: ") and problem in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "url"),
        ({"url": LOCAL, "capacity": 1}, "capacity"),
        ({"url": LOCAL, "prefix": ""}, "end with ':'"),
        ({"url": LOCAL, "prefix": "kvloom/"}, "end with ':'"),
        ({"url": LOCAL, "prefix": "{tag}:"}, "should be up to 99"),
        ({"url": LOCAL, "prefix": "a*:"}, "should be up to 99"),
        ({"url": LOCAL, "prefix": "a:\n"}, "should be up to 99"),
        ({"url": LOCAL, "expire": 0}, "expire"),
        ({"url": LOCAL, "timeout": 0}, "timeout"),
        ({"url": LOCAL, "connect_timeout": -1}, "connect_timeout"),
        ({"url": LOCAL, "threads": 0}, "threads"),
        ({"url": LOCAL, "username": "u"}, "needs a password"),
        ({"url": "rediss://a", "tls_cert": "c"}, "give both"),
        ({"url": LOCAL, "tls_ca": "c"}, "write rediss://"),
        ({"url": LOCAL, "tls_verify": False}, "write rediss://"),
        ({"url": LOCAL, "sentinel_password": "p"}, "write redis[+]sentinel://"),
        ({"url": f"redis://:{SECRET}@a", "password": SECRET}, "both have a password; remove one"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=problem) as caught:
        RedisConfig(**settings)
    assert SECRET not in str(caught.value) + repr(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://u:{SECRET}@a:1",
        f"redis+sentinel://:{SECRET}@a:1,b/svc",
        f"unix://:{SECRET}@/a.sock",
        f"redis://u:{SECRET}@a@b:1",
    ],
)
def test_a_password_in_a_url_is_kept_and_never_shown(url: str) -> None:
    config = RedisConfig(url=url)
    assert config.password is not None and config.password.get_secret_value().startswith(SECRET)
    shown = repr(config) + str(config) + config.model_dump_json() + repr(config.address) + repr(vars(config))
    assert SECRET not in shown
    assert parse(config.url).endpoints == parse(url).endpoints and parse(config.url).db == parse(url).db


@pytest.mark.parametrize("url", [f"redis://u:{SECRET}@a:b", f"http://u:{SECRET}@a", f"redis://:{SECRET}#@a"])
def test_a_url_that_means_nothing_does_not_show_its_password(url: str) -> None:
    config = EngineConfig.load({"tiers": ["memory", {"type": "redis", "url": url}]})
    with pytest.raises(ConfigError) as caught:
        resolve(config, Registry.discover())
    assert SECRET not in str(caught.value)
    with pytest.raises(pydantic.ValidationError) as invalid:
        RedisConfig(url=url)
    assert SECRET not in str(invalid.value)


def test_the_settings_of_a_tier_are_shown_without_the_password() -> None:
    tier = {"type": "redis", "url": f"redis://u:{SECRET}@a", "prefix": "x:", "expire": "2h", "timeout": "500ms"}
    (_, found) = resolve(EngineConfig.load({"tiers": ["memory", tier]}), Registry.discover()).tiers
    assert found.backend is not None
    settings = found.backend.config.model_dump(mode="json")
    assert (settings["expire"], settings["timeout"], settings["url"]) == (7200.0, 0.5, "redis://a")
    assert SECRET not in repr(found)


def test_a_server_that_is_not_there_is_said_at_start_within_the_timeout() -> None:
    with pytest.raises(ConfigError, match=r"^url: no connection to 127\.0\.0\.1:1: .*; is it running\?"):
        RedisBackend(RedisConfig(url="redis://127.0.0.1:1"))
    with pytest.raises(ConfigError, match=r"^url: no connection to /nowhere/redis\.sock: "):
        RedisBackend(RedisConfig(url="unix:///nowhere/redis.sock"))


def test_what_a_server_says_of_itself_is_escaped_and_cut(caplog: pytest.LogCaptureFixture) -> None:
    policy = "volatile-\x1b[2J" + "x" * 10_000
    opening._warn(Endpoint("host", 1), {"maxmemory_policy": policy}, RedisConfig(url="redis://host"))
    (text,) = caplog.messages
    assert "volatile-\\x1b[2J" in text and text.isprintable() and len(text) < 1000
