"""Digests of weights: of files and folders, and of safetensors that lie about themselves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvloom_connector_vllm import weights
from kvloom_connector_vllm.weights import file_digest, folder_digest


def safetensors(path: Path, sizes: list[int], changed: int = -1) -> None:
    """A file of tensors of so many bytes, of which one has other bytes at its beginning."""
    header, at, data = {}, 0, bytearray()
    for number, size in enumerate(sizes):
        header[str(number)] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        part = bytearray(size)
        if number == changed:
            part[:600] = b"\1" * 600
        data += part
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_one_tensor_of_many_makes_another_model(tmp_path: Path) -> None:
    path, sizes, seen = tmp_path / "model.safetensors", [300_000] * 20 + [5, 0, 2_000_000], set()
    for changed in (-1, 0, 7, 19, 22):
        safetensors(path, sizes, changed)
        seen.add(file_digest(path))
        assert file_digest(path) == folder_digest(tmp_path)
    assert len(seen) == 5


def test_code_beside_the_weights_makes_another_model(tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors", [100])
    seen = {folder_digest(tmp_path)}
    for code in ("A = 1", "A = 2"):
        (tmp_path / "modeling_x.py").write_text(code)
        seen.add(folder_digest(tmp_path))
    assert len(seen) == 3


def test_a_header_longer_than_any_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = b'{"x":{"data_offsets":[0,1],"y":[' + b"[]," * (3 << 20) + b"1]}}"
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4096))
    monkeypatch.setattr(weights.json, "loads", lambda text: pytest.fail("it was parsed"))
    before = weights.file_digest(file)
    with file.open("r+b") as content:
        content.seek(-1, os.SEEK_END)
        content.write(b"x")
    assert weights.file_digest(file) != before


@pytest.mark.parametrize(
    "header",
    [
        json.dumps({str(number): {"data_offsets": [0, 2 << 20]} for number in range(3)}).encode(),
        b"[" * 100_000 + b"]" * 100_000, b"[]", b'{"a": []}', b'{"a": {"data_offsets": [0.5, 1e6]}}',
        b'{"a": {"data_offsets": [0, 1, 2]}}', b'{"a": {"data_offsets": 7}}', b"\xff",
    ],
)  # fmt: skip
def test_a_header_that_lies_is_sampled_as_bytes(tmp_path: Path, header: bytes) -> None:
    """Three tensors that claim the same bytes would be three times the work; a header has room for a million."""
    content = len(header).to_bytes(8, "little") + header + bytes(4 << 20)
    (path := tmp_path / "model.safetensors").write_bytes(content)
    with path.open("rb") as file:
        assert list(weights._parts(file, len(content), ".safetensors")) == [(0, len(content))]
