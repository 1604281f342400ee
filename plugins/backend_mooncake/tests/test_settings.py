"""Settings that Mooncake would take and not work with are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kvloom_backend_mooncake.client import _check_local
from kvloom_backend_mooncake.config import MooncakeConfig


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"segment": "1MiB"}, "write 16MiB or more"), ({"device": "mlx5_0"}, "device: not used with tcp")],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        MooncakeConfig(master="127.0.0.1:50051", **settings)


@pytest.mark.parametrize("settings", [{"segment": 0}, {"segment": "16MiB"}, {"device": "mlx5_0", "protocol": "rdma"}])
def test_what_can_is_taken(settings: dict[str, Any]) -> None:
    MooncakeConfig(master="127.0.0.1:50051", **settings)


def test_a_local_host_that_is_another_machine_is_refused() -> None:
    for host in ("127.0.0.1", "localhost"):
        _check_local(host)
    for host in ("192.0.2.7", "no-such-host.invalid"):
        with pytest.raises(ValueError, match=r"local_host: .* is no address of this machine"):
            _check_local(host)
