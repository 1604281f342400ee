"""Mooncake's client: one for each instance, in the process that made it, and never used once it is closed."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvloom import BackendError
from kvloom_backend_mooncake.codes import MasterError, error
from kvloom_backend_mooncake.config import MooncakeConfig

logger = logging.getLogger("kvloom.backend_mooncake")

INSTALL = (
    "Mooncake's client is not installed; pip install mooncake-transfer-engine-non-cuda, "
    "or mooncake-transfer-engine on machines with CUDA"
)
_SETUP_ATTEMPTS = 2
_told: dict[str, str] = {}
"""Environment variables that were set here."""
_left: list[Callable[[Any], object]] = []
"""Keeps alive the memory of clients that were closed while a call hung."""


def _check_local(host: str) -> None:
    """Raises ValueError if other machines would look for this one elsewhere."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
        family, kind, number, _, address = found[0]
        with socket.socket(family, kind, number) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        text = (
            f"local_host: {host!r} is no address of this machine ({error}); name one that others reach, or leave it out"
        )
        raise ValueError(text) from None


def load() -> Any:
    """The module `mooncake.store`. Raises ValueError with what to install."""
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as missing:
        raise ValueError(INSTALL) from missing
    except ImportError as broken:  # a system library is not there
        raise ValueError(
            f"Mooncake's client does not load ({broken}); apt-get install libibverbs1 libnuma1 libcurl4"
        ) from broken


class Client:
    """A set-up client; `using` gives it out. After a fork it belongs to the parent alone."""

    def __init__(self, config: MooncakeConfig) -> None:
        """Raises ValueError, with what to do about it, if there is no master, or it refuses."""
        self._config = config
        self._pid = os.getpid()
        self._idle = threading.Condition()
        self._calls = 0
        self._closed = False
        self._silent = False
        if config.local_host:
            _check_local(config.local_host)
        _tell(patience(config))
        module = load()
        try:
            self._reach_master()
        except OSError as refused:
            raise ValueError(
                f"master: no answer at {config.master} ({refused}); start mooncake_master, or correct the address"
            ) from refused
        self.replication = _replication(module, config)
        self._store = module.MooncakeDistributedStore()
        # The destructor of a client talks to threads. In a child of a fork they are not there, and it would crash.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))
        self._set_up()

    def _set_up(self) -> None:
        config = self._config
        settings = {
            "local_hostname": config.local_host or _own_address(config),
            "metadata_server": config.metadata,
            "global_segment_size": str(int(config.segment)),
            "local_buffer_size": str(int(config.buffer)),
            "protocol": config.protocol,
            "rdma_devices": config.device,
            "master_server_addr": config.master,
            "tenant_id": config.tenant,
        }
        code = self._store.setup(settings)
        if code != 0:
            self._release()
            raise ValueError(
                f"master: the client could not be set up with {config.master} and metadata {config.shown_metadata} "
                f"(code {code}); is mooncake_master {'and the metadata server ' * ('://' in config.metadata)}running "
                "there, of the same version as the client, and `segment` within this machine's memory"
                f"{'' if config.protocol == 'tcp' else f', and is the client built with protocol {config.protocol!r}'}?"
            )

    @contextlib.contextmanager
    def using(self) -> Iterator[Any]:
        """The store, open for as long as the block runs. Raises BackendError in a child of the process that made it."""
        if os.getpid() != self._pid:
            raise BackendError("Mooncake's client does not survive a fork; open the engine in the child, or spawn it")
        with self._idle:
            if self._closed:
                raise BackendError("closed")
            self._calls += 1
        try:
            self._ask_first()
            yield self._store
        except MasterError as unanswered:
            self._silent = unanswered.code == -900
            raise
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def _ask_first(self) -> None:
        """Check the master's port, which fails at once if it is closed; the client would try for several seconds."""
        if not self._silent:
            return
        try:
            self._reach_master()
        except OSError as refused:
            raise MasterError(f"{self._config.master}: {refused}", -900) from refused
        self._silent = False

    def _reach_master(self) -> None:
        try:
            socket.create_connection(self._config.address, timeout=self._config.connect_timeout).close()
        except UnicodeError as error:  # a name that there cannot be
            raise OSError(str(error)) from None

    def close(self, forget: Callable[[Any], object]) -> None:
        """Wait for calls that are under way, but not for ever: a client that is closed under them crashes.

        forget: called with the store once no call is under way; it gives back what calls use, such as memory.
        """
        if os.getpid() != self._pid:
            return
        with self._idle:
            if self._closed:
                return
            self._closed = True
            quiet = self._idle.wait_for(lambda: not self._calls, timeout=2 * self._config.timeout)
        if quiet:
            try:
                forget(self._store)
            finally:
                self._store.close()
                self._release()
        else:
            _left.append(forget)
            logger.warning("a call of Mooncake's client hangs; the client is left open until the process ends")

    def _release(self) -> None:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._store))
        del self._store


def patience(config: MooncakeConfig) -> Mapping[str, str]:
    """Environment variables by which the client learns how long to wait; those that are set already stay."""
    milliseconds, seconds = str(math.ceil(config.timeout * 1000)), str(math.ceil(config.timeout))
    return {
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": str(math.ceil(config.connect_timeout * 1000)),
        "MC_HANDSHAKE_CONNECT_TIMEOUT": str(math.ceil(config.connect_timeout)),
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_ADMISSION_TIMEOUT_MS": milliseconds,
        "MC_STORE_CLIENT_SETUP_RETRIES": str(_SETUP_ATTEMPTS),
        "MC_LOG_LEVEL": "ERROR",
    }


def _tell(wanted: Mapping[str, str]) -> None:
    """Set environment variables permanently: the client has no other interface, and reads some of them only at the
    first transfer. Variables that are set already stay."""
    for name, value in wanted.items():
        if os.environ.get(name) == _told.get(name):
            os.environ[name] = _told[name] = value


def _own_address(config: MooncakeConfig) -> str:
    """The address of the interface that leads to the master."""
    host, port = config.address
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _replication(module: Any, config: MooncakeConfig) -> Any:
    wanted = module.ReplicateConfig()
    wanted.replica_num = config.replicas
    if config.soft_pin:
        wanted.soft_pin_action = module.SoftPinAction.ENABLE
    return wanted


def check(doing: str, code: int) -> int:
    """`code`, unless it is negative. Raises MooncakeError."""
    if code < 0:
        raise error(doing, code)
    return code
