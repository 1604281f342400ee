"""The three stores: how each is started, and what the hosts' configurations say of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from network import Forward, Network

Tier = dict[str, Any]


@dataclass
class Store:
    """A running store. server: has `kill`, `restart`, `freeze` and `thaw`."""

    name: str
    server: Any
    tiers: Mapping[str, Tier]
    """The tiers in each host's configuration."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the hosts: credentials."""


@contextlib.contextmanager
def redis(network: Network) -> Iterator[Store]:
    """One redis-server."""
    from kvloom_backend_redis.testing import RedisServer

    with RedisServer() as server, _reachable(network, server.port):
        tier = {"type": "redis", "url": f"redis://{network.address}:{server.port}", "timeout": "1s"}
        yield Store("Redis", server, dict.fromkeys("ab", tier))


@contextlib.contextmanager
def rgw(network: Network) -> Iterator[Store]:
    """One Ceph cluster of a monitor, a storage daemon and an S3 gateway."""
    from kvloom_backend_fsspec.testing import ACCESS_KEY, SECRET_KEY, CephRGW, s3_client

    with CephRGW() as server, _reachable(network, server.port):
        client = s3_client(server.endpoint)
        client.create_bucket(Bucket="kvloom")
        client.put_object(Bucket="kvloom", Key="first", Body=b"makes Ceph set up what a bucket lies in")
        options = {"endpoint": f"http://{network.address}:{server.port}", "region": "us-east-1"}
        tier = {"type": "fsspec", "url": "s3://kvloom/cluster", "options": options, "allow_http": True, "timeout": 2.0}
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        yield Store("Ceph RGW", server, dict.fromkeys("ab", tier), keys)


@contextlib.contextmanager
def mooncake(network: Network) -> Iterator[Store]:
    """One master; host A contributes the memory, and host B reads it from there."""
    from kvloom_backend_mooncake.testing import MooncakeMaster

    with MooncakeMaster(host=network.address, options=["--client_ttl=3"]) as server:
        tier = {"type": "mooncake", "master": server.address, "timeout": "1s", "connect_timeout": "500ms"}
        yield Store("Mooncake", server, {"a": {**tier, "segment": "512MiB"}, "b": tier})


STORES = {"redis": redis, "rgw": rgw, "mooncake": mooncake}


@contextlib.contextmanager
def _reachable(network: Network, port: int) -> Iterator[None]:
    """The servers of the tests listen at 127.0.0.1."""
    if network.address == "127.0.0.1":
        yield
        return
    with contextlib.closing(Forward(network.address, port)):
        yield
