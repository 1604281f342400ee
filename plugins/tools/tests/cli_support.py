"""Support for the command's tests: running it, and disk stores that an engine has filled."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from glob import glob
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import pytest
import torch
from policies_support import eventually

import kvloom
from kvloom import Buffer, Buffers, Engine, Entry, KVSpec, hookimpl
from kvloom.builtin.dict_backend import DictBackend
from kvloom.cli.main import main

SPEC = KVSpec(model="tiny", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16", revision="abc")
CHUNK = 4


class Done(NamedTuple):
    """The result of a run of the command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*arguments: object, status: int | None = 0) -> Done:
    """Run a verb in this process. status: the exit status that is expected; None for any."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["kvloom", *map(str, arguments)]),
        mock.patch.dict("os.environ", {"COLUMNS": "250"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as left,
    ):
        main()
    done = Done(int(left.value.code or 0), out.getvalue(), err.getvalue())
    assert status in (None, done.status), done
    return done


def fill(config: Path, count: int, spec: KVSpec = SPEC, *, first: int = 0, salt: str = "") -> list[int]:
    """Store `count` chunks of tokens; the tokens."""
    tokens = list(range(first, first + count * CHUNK))
    kv = torch.randn(spec.blob_shape(len(tokens)), generator=torch.Generator().manual_seed(first))
    with Engine.open(config, spec) as engine:
        engine.store(torch.tensor(tokens), kv=kv.to(spec.torch_dtype), salt=salt)
        assert engine.flush(30)
        # What is over a bound goes once the store has been listed, which a busy machine may not have done by now.
        assert eventually(lambda: all(tier.recovered for tier in engine.health().tiers if tier.capacity is not None))
        assert engine.flush(30)
    return tokens


def ask(path: Path, tokens: list[int], *options: object, spec: KVSpec | None = SPEC) -> Any:
    """The output of `kvloom why --json`. spec: None to give none."""
    prompt = path.with_name("tokens.json")
    prompt.write_text(json.dumps(tokens))
    arguments = ["why", path, "--tokens", prompt, "--json", *options]
    if spec is not None:
        path.with_name("spec.json").write_text(spec.to_json())
        arguments += ["--spec", path.with_name("spec.json")]
    return run(*arguments).json


def blobs_in(root: Path) -> list[Path]:
    """The files of chunks below a disk store, in the order of their depth."""
    found = map(Path, glob(str(root / "*/*/+??/*-*")))  # which, unlike Path.glob, bears directories that go meanwhile
    files = [path for path in found if path.is_file()]
    return sorted(files, key=lambda path: int(path.name.partition("-")[0]))


def key_of(file: Path, root: Path) -> str:
    fingerprint, salt, _, name = file.relative_to(root).parts
    return f"{fingerprint}/{salt}/{name}"


class Rack(DictBackend):
    """Dictionaries that are found again by their label, as by another process, and that do what a test says."""

    type = "rack"
    persistent = True
    shared = True
    racks: ClassVar[dict[str, dict[str, bytes]]] = {}
    before: ClassVar[dict[str, Callable[[str, str], None]]] = {}
    """By label: called with the verb and the key."""

    class Config(kvloom.Config):
        label: str = "one"

    def __init__(self, config: Any, spec: object = None) -> None:
        super().__init__(config)
        self.label = config.label
        self._blobs = self.racks.setdefault(config.label, {})
        self._do("open", "")

    def _do(self, verb: str, key: str) -> None:
        self.before.get(self.label, lambda verb, key: None)(verb, key)

    def put(self, key: str, blob: Buffers) -> None:
        self._do("put", key)
        super().put(key, blob)

    def get(self, key: str) -> Buffer | None:
        self._do("get", key)
        return super().get(key)

    def contains(self, key: str) -> bool:
        self._do("contains", key)
        return super().contains(key)

    def delete(self, key: str) -> None:
        self._do("delete", key)
        super().delete(key)

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        self._do("scan", prefix)
        return super().scan(prefix)

    def close(self) -> None:
        self._do("close", "")


@contextlib.contextmanager
def rack_installed(place: Path) -> Iterator[None]:
    """`type: rack` as an installed plugin."""
    metadata = place / "racks-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: racks\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[kvloom.v1]\nracks = made_here_racks\n")
    module = ModuleType("made_here_racks")
    module.kvloom_storage_backends = hookimpl(lambda: [Rack])  # type: ignore[attr-defined]
    with (
        mock.patch.dict(sys.modules, {"made_here_racks": module}),
        mock.patch.object(sys, "path", [str(place), *sys.path]),
    ):
        yield
    Rack.racks.clear()
    Rack.before.clear()


def write_lines(path: Path, *values: Any) -> Path:
    path.write_text("".join((value if isinstance(value, str) else json.dumps(value)) + "\n" for value in values))
    return path
