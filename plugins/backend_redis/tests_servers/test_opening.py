"""Servers that cannot be used as they are: at start the setting at fault is named, and what to do."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom import BackendError, ConfigError, Engine, KVSpec
from kvloom_backend_redis import opening
from kvloom_backend_redis.backend import RedisBackend
from kvloom_backend_redis.testing import RedisCluster, RedisSentinel, RedisServer, certificates
from kvloom_testkit.backends.doubles import put_all
from kvloom_testkit.faults import TcpProxy

Open = Callable[..., RedisBackend]
SPEC = KVSpec(model="m", num_layers=1, num_kv_heads=1, head_size=8, dtype="bfloat16")
PASSWORD = "s3cr3t-p4ss"


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    with RedisServer(requirepass=PASSWORD, maxmemory="64mb", maxmemory_policy="allkeys-lru") as server:
        yield server


def test_passwords(guarded: RedisServer, open_backend: Open) -> None:
    open_backend(guarded.url, password=PASSWORD).put("a", [b"blob"])
    assert open_backend(guarded.url.replace("//", f"//default:{PASSWORD}@")).get("a") == b"blob"
    for settings in ({}, {"password": "wr0ng"}, {"username": "nobody", "password": PASSWORD}):
        with pytest.raises(ConfigError, match=r"^password: .*set `.*password`?") as caught:
            open_backend(guarded.url, **settings)
        assert PASSWORD not in str(caught.value) and "wr0ng" not in str(caught.value)


def test_a_password_that_the_server_does_not_have(server: RedisServer, open_backend: Open) -> None:
    with pytest.raises(ConfigError, match=r"^password: the server has none; remove"):
        open_backend(server.url, password=PASSWORD)


@pytest.mark.parametrize("missing", ["get", "getrange", "strlen", "exists", "touch"])
def test_a_user_who_may_not_read_all_that_is_needed(guarded: RedisServer, open_backend: Open, missing: str) -> None:
    client = guarded.client()
    client.execute_command(
        "ACL", "SETUSER", "reader", "reset", "on", f">{PASSWORD}", "~kvloom:*", "+@all", f"-{missing}"
    )
    with pytest.raises(ConfigError, match=r"^url: NOPERM .*: allow the user: ACL SETUSER .* \+get \+getrange"):
        open_backend(guarded.url, username="reader", password=PASSWORD)
    client.close()


def test_a_user_with_exactly_the_rights_that_are_documented(guarded: RedisServer, open_backend: Open) -> None:
    client = guarded.client()
    rights = [f"+{word}" for word in opening.COMMANDS.split()]
    client.execute_command("ACL", "SETUSER", "cache", "reset", "on", f">{PASSWORD}", "~kvloom:*", *rights)
    client.close()
    backend = open_backend(guarded.url, username="cache", password=PASSWORD)
    backend.check_writable()
    backend.put("a", [b"blob"])
    assert backend.create("a/b", [b"b"]) and backend.contains("a") and backend.hold("evict")
    assert {entry.key for entry in backend.scan()} >= {"a", "a/b"} and backend.get("a") == b"blob"
    backend.touch_many(["a"])
    backend.delete_many(["a", "a/b"])
    assert backend.identity() is not None


def test_a_user_who_may_only_read(guarded: RedisServer, open_backend: Open) -> None:
    client = guarded.client()
    rights = ["+@read", "+@connection", "+touch"]
    client.execute_command("ACL", "SETUSER", "guest", "reset", "on", f">{PASSWORD}", "~kvloom:*", *rights)
    client.close()
    backend = open_backend(guarded.url, username="guest", password=PASSWORD)
    assert backend.get("a") is None and backend.identity() is None
    with pytest.raises(ValueError, match=r"NOPERM .*allow the user"):
        backend.check_writable()


def test_a_user_of_another_prefix(guarded: RedisServer, open_backend: Open) -> None:
    client = guarded.client()
    client.execute_command("ACL", "SETUSER", "other", "reset", "on", f">{PASSWORD}", "~other:*", "+@all")
    client.close()
    with pytest.raises(ConfigError, match=r"NOPERM"):
        open_backend(guarded.url, username="other", password=PASSWORD)
    open_backend(guarded.url, username="other", password=PASSWORD, prefix="other:").put("a", [b"b"])


def test_a_database_that_is_not_there(server: RedisServer, open_backend: Open) -> None:
    with pytest.raises(ConfigError, match=r"^url: the server has no database 99; name one that it has"):
        open_backend(f"{server.url}/99")


def test_a_replica_opens_to_be_read_only(server: RedisServer, open_backend: Open) -> None:
    with RedisServer(replicaof=f"{server.host} {server.port}", maxmemory="64mb") as replica:
        backend = open_backend(replica.url)
        with pytest.raises(ValueError, match=r"READONLY .*: this server is a replica; name its master"):
            backend.check_writable()
        with pytest.raises(BackendError, match=r"READONLY"):
            backend.put("a", [b"blob"])


def test_a_full_server_that_evicts_nothing(open_backend: Open, caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer(maxmemory="8mb", maxmemory_policy="noeviction") as server:
        backend = open_backend(server.url)
        assert "never evicts kvloom's blobs (maxmemory-policy noeviction)" in caplog.text
        backend.check_writable()
        with pytest.raises(BackendError, match=r"OOM"):
            put_all(backend, ((f"k/{number}", [os.urandom(1 << 20)]) for number in range(100)))
        assert len(backend.get("k/0") or b"") == 1 << 20, "what is there can be read"
        with contextlib.closing(server.client()) as client:
            client.config_set("maxmemory", "1mb")
        with pytest.raises(ValueError, match=r"OOM .*set its `maxmemory-policy` to allkeys-lru"):
            backend.check_writable()
        with contextlib.closing(server.client()) as client:
            client.config_set("maxmemory", "8mb")
        backend.delete_many([f"k/{number}" for number in range(100)])
        backend.put("k/0", [b"room again"])


def test_a_server_without_bounds_is_warned_of(open_backend: Open, caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer() as server:
        open_backend(server.url)
        assert "has no maxmemory and will take all available memory" in caplog.text


def test_nothing_is_said_where_all_is_well(
    server: RedisServer, open_backend: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    open_backend(server.url)
    assert caplog.text == ""


def test_tls_on_one_side_only(tls_server: RedisServer, server: RedisServer, open_backend: Open, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"^url: .*If it speaks TLS, write rediss://"):
        open_backend(f"redis://{tls_server.host}:{tls_server.port}")
    with pytest.raises(ConfigError, match=r"^url: .*if it does not speak TLS write redis://"):
        open_backend(f"rediss://{server.host}:{server.port}", connect_timeout=0.3)
    with pytest.raises(ConfigError, match=r"^url: .*certificate verify failed.*`tls_ca` names"):
        open_backend(tls_server.url)
    with certificates() as others, pytest.raises(ConfigError, match=r"certificate verify failed"):
        open_backend(tls_server.url, tls_ca=others.ca)
    with pytest.raises(ConfigError, match=r"^tls_ca: cannot read "):
        open_backend(tls_server.url, tls_ca=tmp_path / "absent")
    open_backend(tls_server.url, tls_verify=False).put("a", [b"blob"])
    assert time.monotonic() - began < 20


def test_a_certificate_of_another_name(open_backend: Open) -> None:
    with certificates("DNS:localhost") as signed, RedisServer(tls=signed, host="localhost", maxmemory="64mb") as server:
        open_backend(server.url, tls_ca=signed.ca)
        with pytest.raises(ConfigError, match=r"IP address mismatch|not valid for"):
            open_backend(f"rediss://127.0.0.1:{server.port}", tls_ca=signed.ca)


def test_certificates_of_clients(open_backend: Open) -> None:
    with certificates() as signed, RedisServer(tls=signed, tls_auth_clients="yes", maxmemory="64mb") as server:
        server_url = server.url
        with pytest.raises(ConfigError, match=r"^url: "):
            open_backend(server_url, tls_ca=signed.ca)
        mine = {"tls_ca": signed.ca, "tls_cert": signed.cert, "tls_key": signed.key}
        open_backend(server_url, **mine).put("a", [b"blob"])


def test_the_wrong_kind_of_server(cluster: RedisCluster, server: RedisServer, open_backend: Open) -> None:
    with pytest.raises(ConfigError, match=r"^url: this server is a node of a cluster; write redis\+cluster://"):
        open_backend(cluster.nodes[0].url)
    with pytest.raises(ConfigError, match=r"^url: this server is not a cluster; write redis://"):
        open_backend(f"redis+cluster://{server.host}:{server.port}")
    with RedisSentinel(server) as sentinel:
        with pytest.raises(ConfigError, match=r"^url: this server is a Sentinel; write redis.sentinel://"):
            open_backend(f"redis://{sentinel.host}:{sentinel.port}")
        with pytest.raises(ConfigError, match=r"^url: the Sentinels know no service 'absent'"):
            open_backend(sentinel.url.replace("/kv", "/absent"))
    with pytest.raises(ConfigError, match=r"^url: "):
        open_backend(f"redis+sentinel://{server.host}:{server.port}/kv")


def test_a_server_that_does_not_answer_at_start(server: RedisServer, open_backend: Open) -> None:
    with TcpProxy(server.host, server.port) as proxy:
        proxy.answers.black_hole = True
        began = time.monotonic()
        with pytest.raises(ConfigError, match=r"^url: no answer from the server: .*sent nothing for too long"):
            open_backend(f"redis://127.0.0.1:{proxy.port}", timeout=0.3)
        assert time.monotonic() - began < 5


def test_an_engine_says_where_in_the_configuration_it_is(server: RedisServer, guarded: RedisServer) -> None:
    def refused(*tiers: dict[str, Any]) -> str:
        with pytest.raises(ConfigError) as caught:
            Engine.open({"connector": "plain", "tiers": ["memory", *tiers]}, SPEC)
        return str(caught.value)

    assert refused({"type": "redis", "url": guarded.url}).startswith("tiers.1.password: ")
    assert "evicts by itself" in refused({"type": "redis", "url": server.url, "capacity": "1GiB"})
    same = {"type": "redis", "url": server.url}
    assert "same store" in refused(same, {**same, "name": "again", "url": f"{server.url}/0"})
    other = {**same, "name": "again", "prefix": "other:"}
    Engine.open({"connector": "plain", "tiers": ["memory", same, other]}, SPEC).close()
