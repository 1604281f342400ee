"""Checks at start: the kind of server, the user's rights, and the errors for both."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import ssl
import stat
from pathlib import Path
from typing import NamedTuple

from kvloom import BackendError, ConfigError, one_line
from kvloom_backend_redis.address import Address, Endpoint
from kvloom_backend_redis.config import RedisConfig
from kvloom_backend_redis.errors import LinkLost, ServerError, Unreachable
from kvloom_backend_redis.exchange import Exchange
from kvloom_backend_redis.link import Reply, packed

logger = logging.getLogger("kvloom.backend_redis")

OLDEST = (6, 0)
MOST_BYTES = 512 << 20
"""The default limit on a server's values (`proto-max-bulk-len`)."""
COMMANDS = "get getrange set strlen exists unlink touch scan eval ping hello info select"
"""Commands that a user must be allowed to run. A tier that is only read works without `set`, `unlink` and `eval`, and
one in database 0 without `select`."""
_PROBE_SECONDS = 10
_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")
_BYTES = re.compile(r"[0-9]{1,19}")
_MOST_FILE_BYTES = 16 << 20
"""Largest certificate file; all that a system trusts is a small part of it."""
_ADVICE = {
    "NOAUTH": "the server asks for a password; set `password: ${env:...}`, and `username` if it has users",
    "WRONGPASS": "the server does not know this user or password; set `username` and `password` to what it knows",
    "NOPERM": f"allow the user: ACL SETUSER NAME ~PREFIX* {' '.join('+' + word for word in COMMANDS.split())}",
    "LOADING": "the server is reading its data from disk; start when it has",
    "READONLY": "this server is a replica; name its master, or the Sentinels, or set `write: never`",
    "OOM": "the server is full and evicts nothing; set its `maxmemory-policy` to allkeys-lru, give it more "
    "`maxmemory`, or set `write: never`",
    "MISCONF": "the server cannot save its data and takes no writes; look into its log, or CONFIG SET "
    "stop-writes-on-bgsave-error no",
    "CLUSTERDOWN": "the cluster does not serve all slots; look at CLUSTER INFO",
    "DENIED": "the server is in protected mode; give it a password, or bind it to an address that only friends reach",
}


class Server(NamedTuple):
    """Facts about the store that are known once it is open."""

    identity: str | None
    most_bytes: int
    """The largest value that it takes."""


def check_files(config: RedisConfig) -> None:
    """Raises ConfigError with the setting whose file cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for name, path in (("tls_ca", config.tls_ca), ("tls_cert", config.tls_cert), ("tls_key", config.tls_key)):
        try:
            if path is not None:
                _check_file(path)
            if path is not None and name == "tls_ca":
                context.load_verify_locations(path)
            if path is not None and name == "tls_key":  # both have been read
                context.load_cert_chain(config.tls_cert or path, path)
        except ssl.SSLError as error:
            raise ConfigError(name, f"{path} holds no such thing, or none that goes with the other: {error}") from None
        except OSError as error:
            raise ConfigError(name, f"cannot read {path}: {error.strerror}; name a PEM file") from None


def _check_file(path: Path) -> None:
    """Raise OSError unless the path is a regular file: on a FIFO, OpenSSL would wait for its writer."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_FILE_BYTES:
        raise OSError(errno.EINVAL, f"it is not a file, or has more than {_MOST_FILE_BYTES} bytes")


def opened(exchange: Exchange, config: RedisConfig) -> Server:
    """Raises ConfigError, with what to do, if this store cannot be used."""
    address = config.address
    try:
        masters = exchange.topology.masters()
        for endpoint in masters if address.kind == "cluster" else masters[:1]:
            info = _looked_at(exchange, endpoint, address)
            _warn(endpoint, info, config)
        _may_read(exchange, config)
        identity = _identity(exchange, info, address)
        return Server(identity and f"{identity}/{config.prefix}", _most_bytes(exchange, masters[0]))
    except ServerError as error:
        raise _refused(error, address) from None
    except (BackendError, OSError) as error:
        raise ConfigError("url", _unreached(error, address)) from None


def check_writable(exchange: Exchange, config: RedisConfig) -> None:
    """Put something that is not a blob, and delete it. Raises ValueError with what to do, or OSError."""
    key = _probe(config)
    try:
        exchange.ask(key, b"SET", key, b"probe", b"PX", b"%d" % (_PROBE_SECONDS * 1000))
        exchange.ask(key, b"UNLINK", key)
    except ServerError as error:
        raise _refused(error, config.address) from None
    except BackendError as error:
        raise ConfigError("url", str(error)) from None


def _probe(config: RedisConfig) -> bytes:
    return f"{config.prefix}+probe-{secrets.token_hex(8)}".encode()  # no key of kvloom's has a '+'


def _looked_at(exchange: Exchange, endpoint: Endpoint, address: Address) -> dict[str, str]:
    """A server's answers about itself. Raises ConfigError if its kind differs from the URL's, or if it is too old."""
    hello, info = exchange.at(endpoint, packed(b"HELLO"), packed(b"INFO"))
    if isinstance(hello, ServerError) and hello.word != "NOPERM":
        if "unknown command" in str(hello):
            raise ConfigError("url", f"the server at {endpoint} is older than Redis 6; kvloom needs 6.0 or later")
        raise hello
    if not isinstance(hello, (list, ServerError)):
        raise ConfigError("url", f"the server at {endpoint} is not Redis or Valkey; name one")
    said = _pairs(hello)
    version = one_line(said.get("version", ""))
    numbers = _VERSION.match(version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise ConfigError("url", f"the server at {endpoint} is version {version}; kvloom needs 6.0 or later")
    mode = said.get("mode", "")
    if mode == "sentinel":
        raise ConfigError("url", "this server is a Sentinel; write redis+sentinel://host:port/service")
    if mode == "cluster" and address.kind != "cluster":
        raise ConfigError("url", "this server is a node of a cluster; write redis+cluster://host:port")
    if not isinstance(info, bytes):
        return {}
    rows = (line.partition(":") for line in info.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in rows if colon}


def _pairs(reply: Reply) -> dict[str, str]:
    if not isinstance(reply, list):
        return {}
    texts = [one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one) for one in reply]
    return dict(zip(texts[::2], texts[1::2], strict=False))


def _warn(endpoint: Endpoint, info: dict[str, str], config: RedisConfig) -> None:
    policy = one_line(info.get("maxmemory_policy", ""))
    if info.get("maxmemory") == "0":
        logger.warning(
            "%s has no maxmemory and will take all available memory; set it, and maxmemory-policy allkeys-lru",
            endpoint,
        )
    elif policy == "noeviction" or (policy.startswith("volatile-") and config.expire is None):
        logger.warning(
            "%s never evicts kvloom's blobs (maxmemory-policy %s), and will fill up; set allkeys-lru",
            endpoint,
            policy,
        )


def _may_read(exchange: Exchange, config: RedisConfig) -> None:
    key = _probe(config)
    for words in ((b"GET", key), (b"GETRANGE", key, b"0", b"0"), (b"STRLEN", key), (b"EXISTS", key), (b"TOUCH", key)):
        exchange.ask(key, *words)


def _identity(exchange: Exchange, info: dict[str, str], address: Address) -> str | None:
    if address.kind == "cluster":
        return exchange.topology.store_id()
    run_id = info.get("run_id")
    return run_id and f"{run_id}/{address.db}"


def _most_bytes(exchange: Exchange, endpoint: Endpoint) -> int:
    (said,) = exchange.at(endpoint, packed(b"CONFIG", b"GET", b"proto-max-bulk-len"))
    found = _pairs(said).get("proto-max-bulk-len", "")
    return int(found) if _BYTES.fullmatch(found) else MOST_BYTES  # few users may ask


def _refused(error: ServerError, address: Address) -> ConfigError:
    text = one_line(error)
    if address.kind == "cluster" and "cluster support disabled" in text:
        return ConfigError("url", "this server is not a cluster; write redis://")
    if "unknown command" in text.lower() and "sentinel" in text.lower():
        return ConfigError(
            "url", "this server is not a Sentinel; write redis://, or name the Sentinels, mostly at port 26379"
        )
    if "DB index is out of range" in text:
        return ConfigError("url", f"the server has no database {address.db}; name one that it has, or none")
    word = error.word
    if "invalid username-password" in text or "invalid password" in text.lower():
        word = "WRONGPASS"
    elif "without any password configured" in text:
        return ConfigError("password", "the server has none; remove `password`, or give the server one")
    elif "authentication required" in text.lower():
        word = "NOAUTH"
    at = "password" if word in ("NOAUTH", "WRONGPASS") else "url"
    advice = _ADVICE.get(word)
    return ConfigError(at, f"{text}: {advice}" if advice else f"the server refuses: {text}")


def _unreached(error: Exception, address: Address) -> str:
    if not isinstance(error, LinkLost):
        return str(error)
    if address.tls:
        hint = "if it does not speak TLS write redis://; `tls_ca` names the certificates that are trusted"
    else:
        hint = "is it running? If it speaks TLS, write rediss://"
    said = str(error) or type(error).__name__
    return f"{said if isinstance(error, Unreachable) else f'no answer from the server: {said}'}; {hint}"
