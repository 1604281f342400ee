"""The settings of the `mooncake` tier."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from kvloom import ByteSize, Duration
from kvloom import Config as BaseConfig

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:]+\]|[^:/\s]+):([0-9]{1,5})")

_LEAST_SEGMENT = 16 << 20

PEER_TO_PEER = "P2PHANDSHAKE"
"""No metadata server: processes ask each other."""


class MooncakeConfig(BaseConfig):
    """Sizes in bytes, times in seconds."""

    master: str
    """The address of `mooncake_master`, `host:port`."""
    metadata: str = PEER_TO_PEER
    """A metadata server's URL, or `P2PHANDSHAKE` for none."""
    local_host: str = ""
    """The name or address under which other machines reach this one; by default that of the interface to the master."""
    segment: ByteSize = ByteSize(0)
    """Memory that this process contributes to the pool; 0 only uses that of others."""
    buffer: ByteSize = Field(default=ByteSize(16 << 20), gt=0)
    """The client's own memory."""
    protocol: str = Field(default="tcp", min_length=1)
    """The transport: `tcp`, `rdma`, or another one that the client was built with."""
    device: str = ""
    """Network devices for `rdma`, for example `mlx5_0`; empty lets the client choose."""
    replicas: int = Field(default=1, ge=1)
    """Number of segments that store each blob."""
    soft_pin: bool = False
    """Blobs of this tier are evicted after those that are not pinned."""
    tenant: str = Field(default="default", min_length=1)
    """Mooncake's tenant, where the master has several."""
    timeout: Annotated[Duration, Field(gt=0, le=3600)] = 5.0
    """For one answer of the master, and for a transfer in which nothing moves."""
    connect_timeout: Annotated[Duration, Field(gt=0, le=3600)] = 1.0
    """For one attempt to connect."""

    @field_validator("master")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        match = _ADDRESS.fullmatch(value)
        if match is None or not 0 < int(match[2]) < 65536:
            raise ValueError(f"{value!r} is not host:port; write for example 127.0.0.1:50051")
        return value

    @field_validator("metadata")
    @classmethod
    def _is_a_server(cls, value: Any) -> Any:
        if value != PEER_TO_PEER and "://" not in value:
            raise ValueError(f"{value!r} is not a URL; write {PEER_TO_PEER}, or for example http://host:8080/metadata")
        return value

    @field_validator("segment")
    @classmethod
    def _can_be_contributed(cls, value: ByteSize) -> ByteSize:
        if 0 < value < _LEAST_SEGMENT:
            raise ValueError(
                f"{value.human_readable()} is below Mooncake's minimum; write 16MiB or more, or 0 for none"
            )
        return value

    @model_validator(mode="after")
    def _belongs_together(self) -> MooncakeConfig:
        if self.device and self.protocol == "tcp":
            raise ValueError("device: not used with tcp; remove it, or set `protocol: rdma`")
        return self

    @property
    def shown_metadata(self) -> str:
        """`metadata` without its login."""
        scheme, separator, rest = self.metadata.rpartition("://")
        return f"{scheme}{separator}{rest.rpartition('@')[2]}"

    @property
    def address(self) -> tuple[str, int]:
        """The master's host and port."""
        host, _, port = self.master.rpartition(":")
        return host.strip("[]"), int(port)
