"""SFTP by a real server: OpenSSH's."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom import BackendError, ConfigError, CorruptBlobError, Engine, KVSpec, StorageBackend
from kvloom_backend_fsspec.backend import ExclusiveFsspecBackend, FsspecBackend
from kvloom_backend_fsspec.testing import SshServer
from kvloom_testkit import BackendConformance
from kvloom_testkit.faults import TcpProxy, refusing_port

SPEC = KVSpec(model="tiny", num_layers=2, num_kv_heads=2, head_size=64, dtype="bfloat16")
TOKENS = torch.arange(512)
KV = torch.randn(SPEC.blob_shape(512), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
HANGS_SECONDS = 30.0


def settings(sshd: SshServer, directory: Path, *, port: int | None = None, **more: Any) -> dict[str, Any]:
    options = {"key_filename": str(sshd.key), "known_hosts": str(sshd.known_hosts), **more.pop("options", {})}
    return {"url": f"sftp://127.0.0.1:{port or sshd.port}{directory}/kv", "options": options, **more}


@pytest.fixture(autouse=True)
def has_paramiko() -> None:
    pytest.importorskip("paramiko")


class TestSftp(BackendConformance):
    @pytest.fixture
    def make(self, sshd: SshServer, here: Path) -> Callable[[], StorageBackend]:
        return lambda: FsspecBackend(FsspecBackend.Config(**settings(sshd, here)))


def opened(url: str, **options: str) -> FsspecBackend:
    return FsspecBackend(FsspecBackend.Config(url=url, options=options))


def test_a_name_that_is_not_utf8_ends_no_listing(sshd: SshServer, here: Path) -> None:
    backend = FsspecBackend(FsspecBackend.Config(**settings(sshd, here)))
    backend.put("a/b", [b"blob"])
    for directory in (here / "kv", here / "kv" / "a"):
        Path(os.fsdecode(os.fsencode(directory) + b"/\xff=kv")).write_bytes(b"another's")
    assert [entry.key for entry in backend.scan()] == ["a/b"]
    backend.close()


def test_it_has_options_of_its_own(here: Path) -> None:
    with pytest.raises(ValueError, match=r"^options: sftp:// has no colour, port; it has .*key_filename, known_hosts"):
        opened("sftp://host/kv", colour="blue", port="23")
    for name in ("key_filename", "known_hosts"):
        with pytest.raises(ValueError, match=rf"^options\.{name}: there is no file .*/missing"):
            opened("sftp://host/kv", **{name: f"{here}/missing"})


def test_a_port_that_cannot_be_is_said_to_be_the_urls() -> None:
    for port in ("99999", "ssh"):
        with pytest.raises(ValueError, match=r"^url: Port "):
            opened(f"sftp://host:{port}/kv")


def test_a_directory_that_cannot_be_made_is_named(sshd: SshServer, here: Path) -> None:
    (here / "kv").write_text("a file")
    backend = FsspecBackend(FsspecBackend.Config(**settings(sshd, here)))
    with pytest.raises(ValueError, match=rf"^url: cannot write: .*the directory {here}/kv\S* cannot be made"):
        backend.check_writable()
    with pytest.raises(BackendError, match=rf"the directory {here}/kv\S* cannot be made"):
        backend.put("key", [b"blob"])
    assert backend.get("key") is None
    backend.close()


def test_one_place_has_one_identity_and_opening_asks_nothing() -> None:
    one = opened("sftp://me@host/kv")
    assert one.identity() == opened("ssh://me@host/kv/").identity()
    assert one.identity() != opened("sftp://you@host/kv").identity()
    assert isinstance(one, ExclusiveFsspecBackend)
    one.close()
    one.close()


def test_an_empty_file_is_a_corrupt_blob_and_no_fault_of_the_server(sshd: SshServer, here: Path) -> None:
    backend = FsspecBackend(FsspecBackend.Config(**settings(sshd, here)))
    backend.put("key", [b"blob"])
    logins = (sshd.directory / "sshd.out").read_text().count("Accepted publickey")
    (here / "kv" / "key=kv").write_bytes(b"")
    for _ in range(3):
        with pytest.raises(CorruptBlobError, match="an empty file"):
            backend.get("key")
    assert (sshd.directory / "sshd.out").read_text().count("Accepted publickey") == logins
    backend.close()


def test_a_server_that_does_not_answer_is_given_up(sshd: SshServer, here: Path, proxied: TcpProxy) -> None:
    (here / "known_hosts").write_text(sshd.known_hosts.read_text().replace(str(sshd.port), str(proxied.port)))
    place = settings(sshd, here, port=proxied.port, options={"known_hosts": str(here / "known_hosts")})
    backend = FsspecBackend(FsspecBackend.Config(timeout=0.5, **place))
    backend.put("key", [b"blob"])
    proxied.answers.black_hole = True
    began = time.monotonic()
    with pytest.raises(BackendError, match="it did not answer in time"):
        backend.get("key")
    assert time.monotonic() - began < HANGS_SECONDS
    proxied.answers.black_hole = False
    assert backend.get("key") == b"blob"
    backend.close()


def refused(tier: dict[str, Any]) -> str:
    """The error when an engine is opened."""
    with pytest.raises(ConfigError) as caught:
        Engine.open({"connector": "plain", "tiers": ["memory", {"type": "fsspec", **tier}]}, SPEC).close()
    return str(caught.value)


def test_a_server_whose_key_nobody_has_confirmed(sshd: SshServer, here: Path) -> None:
    (here / "known_hosts").write_text("")
    said = refused(settings(sshd, here, options={"known_hosts": str(here / "known_hosts")}))
    assert said.startswith("tiers.1: url: cannot write: sftp://127.0.0.1:") and "ssh-keyscan" in said


def test_another_server_in_its_place(sshd: SshServer, here: Path) -> None:
    other = f"[127.0.0.1]:{sshd.port} {(sshd.directory / 'user.pub').read_text()}"
    (here / "known_hosts").write_text(other)
    said = refused(settings(sshd, here, options={"known_hosts": str(here / "known_hosts")}))
    assert "it has another key than known_hosts says" in said


def test_a_key_that_it_does_not_take(sshd: SshServer, here: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(here / "other")], check=True)
    assert "it takes none of the keys" in refused(settings(sshd, here, options={"key_filename": str(here / "other")}))


def test_a_directory_that_cannot_be_made(sshd: SshServer) -> None:
    assert "url: cannot write: sftp://" in refused(settings(sshd, Path("/proc/nothing")))


def test_nobody_is_there(sshd: SshServer, here: Path) -> None:
    with refusing_port() as port:
        assert "it cannot be reached" in refused(settings(sshd, here, port=port))


def test_what_does_not_fit_is_an_error_and_what_is_there_is_read(sshd: SshServer, here: Path) -> None:
    small = here / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system needs the right to mount one")
    try:
        backend = FsspecBackend(FsspecBackend.Config(**settings(sshd, small)))
        backend.put("fits", [bytes(1 << 20)])
        for _ in range(3):  # a draft that stayed would take the room of what fits
            with pytest.raises(BackendError, match="is its disk full"):
                backend.put("does-not", [bytes(2 << 20)])
        assert backend.get("fits") == bytes(1 << 20) and not backend.contains("does-not")
        backend.put("fits-too", [bytes(900 << 10)])
        backend.close()
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


@pytest.fixture
def proxied(sshd: SshServer) -> Iterator[TcpProxy]:
    with TcpProxy("127.0.0.1", sshd.port) as proxy:
        yield proxy


@pytest.fixture
def engine(sshd: SshServer, proxied: TcpProxy, here: Path) -> Iterator[Engine]:
    """Its connections go through the proxy."""
    known = here / "known_hosts"
    known.write_text(sshd.known_hosts.read_text().replace(str(sshd.port), str(proxied.port)))
    place = settings(sshd, here, port=proxied.port, options={"known_hosts": str(known)})
    tier = {"type": "fsspec", "timeout": "1s", "deadline": "500ms", **place}
    config = {"chunk_tokens": 32, "connector": "plain", "tiers": [{"type": "memory", "capacity": "8MiB"}, tier]}
    with Engine.open(config, SPEC) as engine:
        yield engine


def serve(engine: Engine) -> int:
    """Retrieve it from the store; asserts that what came is right and the rest untouched. How many chunks came."""
    memory: Any = engine.tiers["memory"]
    until = time.monotonic() + HANGS_SECONDS
    while memory.used_bytes:
        memory.remove(memory.chunks())
        assert time.monotonic() < until, "a lease or a reservation was lost"
        time.sleep(0.01)
    got = torch.zeros_like(KV)
    mask = engine.retrieve(TOKENS, kv=got)
    assert torch.equal(got[:, :, mask], KV[:, :, mask]) and not got[:, :, ~mask].any(), "wrong bytes"
    return int(mask.sum()) // 32


def serves_again(engine: Engine) -> None:
    until = time.monotonic() + 2 * HANGS_SECONDS
    while True:
        engine.store(TOKENS, kv=KV)
        assert engine.flush(HANGS_SECONDS)
        if serve(engine) == 16:
            return
        assert time.monotonic() < until, "it never served again"
        time.sleep(0.1)


@pytest.mark.parametrize("again", range(3))
def test_a_server_that_is_killed_amid_a_batch_and_comes_back(
    sshd: SshServer, engine: Engine, again: int, tally: Callable[..., None]
) -> None:
    serves_again(engine)
    done = threading.Event()
    errors: list[BaseException] = []
    hits: list[int] = []

    def work() -> None:
        try:
            while not done.is_set():
                hits.append(serve(engine))
                engine.store(TOKENS, kv=KV)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.05 * (1 + again))
    sshd.kill()
    time.sleep(0.5)
    sshd.restart()
    done.set()
    thread.join(HANGS_SECONDS)
    assert not thread.is_alive() and not errors, errors
    serves_again(engine)
    tally(kills=1, reads=16 * len(hits), hits=sum(hits))


NETWORKS: dict[str, dict[str, Any]] = {
    "slow": {"delay_seconds": 0.02},
    "cut": {"cut_after_bytes": 30_000},
    "flips": {"flip_at": 20_000},
    "black hole": {"black_hole": True},
}


@pytest.mark.parametrize("fault", NETWORKS)
def test_a_bad_network(fault: str, engine: Engine, proxied: TcpProxy, tally: Callable[..., None]) -> None:
    serves_again(engine)
    for name, value in NETWORKS[fault].items():
        setattr(proxied.answers, name, value)
    hits = 0
    for _ in range(3):
        began = time.monotonic()
        hits += serve(engine)
        assert time.monotonic() - began < HANGS_SECONDS, "a caller waited for the store"
    for name in NETWORKS[fault]:
        setattr(proxied.answers, name, type(proxied.answers).__dataclass_fields__[name].default)
    serves_again(engine)
    tally(reads=3 * 16, hits=hits, connections=proxied.connections)
