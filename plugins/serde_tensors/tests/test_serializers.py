from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pydantic
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import EXACT, Chunk, CorruptBlobError, KVSpec, MemoryFormat, Registry
from kvloom_serde_tensors.serializers import SafetensorsSerializer, TorchSerializer

SPEC = KVSpec(model="m", num_layers=2, num_kv_heads=2, head_size=4, dtype="bfloat16")
BOTH = pytest.mark.parametrize("cls", [TorchSerializer, SafetensorsSerializer])
FLOATS = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
every = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make(cls: Any, dtype: str | None = None, spec: KVSpec | None = SPEC) -> Any:
    return cls(cls.Config(dtype=dtype), spec)


def chunk_of(tensor: torch.Tensor, format: MemoryFormat = MemoryFormat.KV_BLOB) -> Chunk:
    return Chunk(tensor, format, tensor.shape[-2])


def random_chunk(num_tokens: int = 3, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Chunk:
    """KV of any bit pattern, NaNs and infinities included."""
    shape = (*SPEC.blob_shape(num_tokens)[:-1], SPEC.hidden_dim * dtype.itemsize)
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return chunk_of(bits.view(dtype))


def like(chunk: Chunk) -> Chunk:
    return chunk_of(torch.zeros_like(chunk.tensor), chunk.format)


def bits(chunk: Chunk) -> torch.Tensor:
    return chunk.tensor.contiguous().view(torch.uint8)


def test_they_are_found_by_their_entry_point() -> None:
    for cls in (TorchSerializer, SafetensorsSerializer):
        assert Registry.discover().get("serializer", cls.type) is cls


def test_the_entry_module_imports_no_torch() -> None:
    subprocess.run(
        [sys.executable, "-c", "import sys, kvloom_serde_tensors; assert 'torch' not in sys.modules"], check=True
    )


@BOTH
@given(
    num_tokens=st.integers(1, 9),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([*FLOATS, "float64", "uint8", "int32"]),
    cut=st.integers(0, 5000),
)
@every
def test_as_it_is_the_same_bits_come_back(cls: Any, num_tokens: int, seed: int, dtype: str, cut: int) -> None:
    serializer = make(cls)
    assert serializer.lossless and serializer.fidelity == EXACT and serializer.params == {}
    chunk = random_chunk(num_tokens, getattr(torch, dtype), seed)
    before = bits(chunk).clone()
    blob = b"".join(serializer.encode(chunk))
    assert len(blob) <= serializer.max_encoded_bytes(chunk)
    into = like(chunk)
    serializer.decode([blob[:cut], blob[cut:]], into)
    assert torch.equal(bits(into), before) and torch.equal(bits(chunk), before)


@BOTH
def test_pages_pass_through(cls: Any) -> None:
    chunk = chunk_of(torch.arange(96, dtype=torch.uint8).view(2, 3, 16), MemoryFormat.KV_PAGES)
    into = like(chunk)
    assert MemoryFormat.KV_PAGES in make(cls).formats
    make(cls).decode(make(cls).encode(chunk), into)
    assert torch.equal(into.tensor, chunk.tensor)


@BOTH
@pytest.mark.parametrize("dtype", FLOATS)
def test_kept_in_another_dtype_it_says_so_and_comes_back_cast(cls: Any, dtype: str) -> None:
    serializer = make(cls, dtype)
    chunk = chunk_of(torch.linspace(-3, 3, 96).view(SPEC.blob_shape(3)).bfloat16())
    into = like(chunk)
    blob = serializer.encode(chunk)
    serializer.decode(blob, into)
    assert torch.equal(into.tensor, chunk.tensor.to(getattr(torch, dtype)).bfloat16())
    same = dtype == SPEC.dtype
    assert serializer.lossless is same
    assert serializer.fidelity == (EXACT if same else f"{cls.type}/{dtype}")
    assert serializer.params == ({} if same else {"dtype": dtype})
    assert (MemoryFormat.KV_PAGES in serializer.formats) is same
    assert MemoryFormat.KV_BLOB in serializer.formats
    assert len(b"".join(blob)) <= serializer.max_encoded_bytes(chunk)


@BOTH
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_the_bound_holds_for_large_chunks(cls: Any, dtype: str | None) -> None:
    chunk = random_chunk(num_tokens=4000)
    blob = b"".join(make(cls, dtype).encode(chunk))
    assert len(blob) <= make(cls, dtype).max_encoded_bytes(chunk) <= len(blob) + 65536


@BOTH
def test_a_lossy_instance_does_not_change_the_class(cls: Any) -> None:
    make(cls, "float16")
    assert cls.lossless and cls.formats == frozenset(MemoryFormat) and make(cls).lossless


@BOTH
def test_without_a_spec_a_cast_cannot_be_called_lossless(cls: Any) -> None:
    assert not make(cls, "bfloat16", None).lossless


@BOTH
@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_what_is_out_of_range_becomes_the_largest_number(cls: Any, dtype: str) -> None:
    limit = torch.finfo(getattr(torch, dtype)).max
    values = torch.tensor([1e38, -1e38, float("inf"), float("-inf"), 1.0, float("nan")]).bfloat16().view(1, 1, 1, 6)
    into = like(chunk_of(values))
    make(cls, dtype).decode(make(cls, dtype).encode(chunk_of(values)), into)
    back = into.tensor.flatten().float()
    kept = torch.tensor(limit).bfloat16().item()
    assert back[:5].tolist() == [kept, -kept, kept, -kept, 1.0] and back[5].isnan()


@BOTH
def test_a_blob_holds_its_own_chunk_and_nothing_of_the_pool(cls: Any) -> None:
    pool = torch.zeros(1 << 20, dtype=torch.bfloat16)
    pool[:] = 7
    chunk = chunk_of(pool[4096 : 4096 + 96].view(SPEC.blob_shape(3)))
    assert len(b"".join(make(cls).encode(chunk))) < 4096


@BOTH
def test_a_chunk_that_is_not_contiguous(cls: Any) -> None:
    chunk = chunk_of(random_chunk(6).tensor[:, :, ::2])
    into = like(chunk)
    make(cls).decode(make(cls).encode(chunk), into)
    assert torch.equal(bits(into), bits(chunk))


def test_other_programs_can_read_the_blobs(tmp_path: Path) -> None:
    tensor = torch.arange(96.0).view(SPEC.blob_shape(3)).bfloat16()
    (tmp_path / "a.pt").write_bytes(b"".join(make(TorchSerializer).encode(chunk_of(tensor))))
    (tmp_path / "a.safetensors").write_bytes(b"".join(make(SafetensorsSerializer).encode(chunk_of(tensor))))
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True), tensor)
    assert torch.equal(safetensors.torch.load_file(tmp_path / "a.safetensors")["kv"], tensor)


@BOTH
@pytest.mark.parametrize("dtype", ["int8", "float33", "", "torch.float16"])
def test_a_dtype_that_cannot_be(cls: Any, dtype: str) -> None:
    with pytest.raises(pydantic.ValidationError, match="float8_e4m3fn"):
        make(cls, dtype)


# -- bytes that are no blob -------------------------------------------------------------------------------------------


def refuse(cls: Any, blob: bytes, match: str | None = None) -> None:
    into = random_chunk()
    before = bits(into).clone()
    with pytest.raises(CorruptBlobError, match=match):
        make(cls).decode([blob], into)
    assert torch.equal(bits(into), before), "written to before it was checked"


def saved(value: Any, cls: Any = TorchSerializer, **options: Any) -> bytes:
    if cls is SafetensorsSerializer:
        return safetensors.torch.save(value if isinstance(value, dict) else {"kv": value})
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


@BOTH
def test_another_shape_or_kind_is_corrupt(cls: Any) -> None:
    shape = SPEC.blob_shape(3)
    refuse(cls, saved(torch.zeros(SPEC.blob_shape(4)), cls), "where .* was stored")
    refuse(cls, saved(torch.zeros(shape).flatten(), cls), "where .* was stored")
    refuse(cls, saved(torch.zeros(shape, dtype=torch.int16), cls), "torch.int16")
    refuse(cls, saved({}, cls))
    refuse(cls, saved({"a": torch.zeros(shape), "b": torch.ones(shape)}, cls))
    refuse(cls, b"")


@BOTH
def test_pages_are_never_cast(cls: Any) -> None:
    blob = saved(torch.zeros(2, 3, 16), cls)
    with pytest.raises(CorruptBlobError, match="float32"):
        make(cls).decode([blob], chunk_of(torch.zeros(2, 3, 16, dtype=torch.uint8), MemoryFormat.KV_PAGES))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [torch.zeros(SPEC.blob_shape(3))],
        torch.nn.Parameter(torch.zeros(SPEC.blob_shape(3))),
        torch.zeros(SPEC.blob_shape(3)).to_sparse(),
        torch.zeros(SPEC.blob_shape(3), device="meta"),
        torch.zeros(SPEC.blob_shape(3)).to(torch.float8_e8m0fnu),
    ],
)
def test_what_torch_can_save_but_is_no_plain_tensor_is_corrupt(value: Any) -> None:
    refuse(TorchSerializer, saved(value))


def test_formats_of_torch_that_are_never_written_are_not_read() -> None:
    tensor = torch.zeros(SPEC.blob_shape(3), dtype=torch.bfloat16)
    refuse(TorchSerializer, saved(tensor, _use_new_zipfile_serialization=False), "not a zip archive")


class Malice:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@BOTH
def test_no_code_is_run(cls: Any, tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    archive = io.BytesIO()
    good = io.BytesIO(b"".join(make(TorchSerializer).encode(random_chunk())))
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as target:
        for name in source.namelist():
            data = pickle.dumps(Malice(sign), protocol=2) if name.endswith("data.pkl") else source.read(name)
            target.writestr(name, data)
    for blob in (
        pickle.dumps(Malice(sign)),
        saved(Malice(sign)),
        saved(Malice(sign), _use_new_zipfile_serialization=False),
        archive.getvalue(),
    ):
        refuse(cls, blob)
        assert not sign.exists()
    pickle.loads(pickle.dumps(Malice(sign)))
    assert sign.exists(), "the trap does not work"


@BOTH
@given(st.binary(max_size=300), st.sampled_from([b"", b"PK", b"PK\x03\x04", b"\x08\0\0\0\0\0\0\0{}", b"\x80\x02"]))
@every
def test_random_bytes_are_corrupt(cls: Any, data: bytes, start: bytes) -> None:
    refuse(cls, start + data)


@BOTH
@given(st.data())
@settings(max_examples=300, deadline=None)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_damage_is_corrupt_or_another_chunk_of_the_same_shape(cls: Any, data: st.DataObject) -> None:
    blob = bytearray(b"".join(make(cls).encode(random_chunk())))
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        del blob[data.draw(st.integers(0, len(blob) - 1)) :]
    into = like(random_chunk())
    try:
        make(cls).decode([bytes(blob)], into)
    except CorruptBlobError:
        assert not bits(into).any()


@BOTH
def test_integers_are_not_cast(cls: Any) -> None:
    integers = KVSpec(model="m", num_layers=2, num_kv_heads=2, head_size=4, dtype="uint8")
    with pytest.raises(ValueError, match="uint8 cannot be kept as float16"):
        make(cls, "float16", integers)
    assert make(cls, None, integers).lossless


@pytest.mark.parametrize("beside", [(b"", b"\0"), (b"", bytes(64)), (b"PK", b""), (b"", b"PK\5\6" + bytes(18))])
def test_bytes_beside_the_archive_are_corrupt(beside: tuple[bytes, bytes]) -> None:
    chunk = random_chunk()
    blob = b"".join(make(TorchSerializer).encode(chunk))
    with pytest.raises(CorruptBlobError):
        make(TorchSerializer).decode([beside[0] + blob + beside[1]], like(chunk))
    with pytest.raises(CorruptBlobError):
        make(TorchSerializer).decode([blob, blob], like(chunk))


# -- archives that say one thing and hold another ----------------------------------------------------------------------


def rebuilt(blob: bytes, method: int = zipfile.ZIP_STORED, **members: bytes | None) -> bytes:
    """The archive with other members: `data_pkl` for `data.pkl`; None leaves one out."""
    archive = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(blob)) as source, zipfile.ZipFile(archive, "w") as target:
        for name in source.namelist():
            content = members.get(name.partition("/")[2].replace(".", "_").replace("/", "_"), source.read(name))
            if content is not None:
                target.writestr(name, content, compress_type=method if "/data/" in name else zipfile.ZIP_STORED)
    return archive.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_nothing_is_inflated(method: int) -> None:
    blob = saved(torch.zeros(SPEC.blob_shape(3)))
    make(TorchSerializer).decode([rebuilt(blob)], random_chunk())
    refuse(TorchSerializer, rebuilt(blob, method), "is compressed, encrypted or repeated")


def test_a_storage_is_no_longer_than_its_bytes() -> None:
    """torch.load makes one as long as the pickle says, over whatever lies behind the bytes that there are."""
    tensor = torch.zeros(SPEC.blob_shape(3))
    blob = saved(tensor)
    for content in (b"", bytes(8), bytes(tensor.nbytes - 1), bytes(tensor.nbytes + 1), None):
        refuse(TorchSerializer, rebuilt(blob, data_0=content))
    refuse(TorchSerializer, rebuilt(blob, byteorder=b"big"), "byte order")
    view = torch.zeros(2 * tensor.numel())[tensor.numel() :].view(tensor.shape)
    for other in (view, tensor.expand(SPEC.blob_shape(3)).transpose(0, 1), torch.zeros(()).expand(tensor.shape)):
        refuse(TorchSerializer, saved(other))


def test_a_pickle_says_what_a_tensor_is_and_no_more() -> None:
    blob = saved(torch.zeros(SPEC.blob_shape(3)))
    (name,) = (name for name in zipfile.ZipFile(io.BytesIO(blob)).namelist() if name.endswith("data.pkl"))
    pickled = zipfile.ZipFile(io.BytesIO(blob)).read(name)
    for other in (
        pickled.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"),
        pickled.replace(b"FloatStorage", b"nothing"),
        pickled[:2] + b"(" * 5_000 + pickled[2:],
        pickled[:-1] + b"0.",
        b"",
        b".",
    ):
        refuse(TorchSerializer, rebuilt(blob, data_pkl=other))


def test_a_name_in_a_pickle_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch imports whole packages when it is asked for some names: `_dynamo` is 800 modules."""
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    blob = saved(torch.zeros(4, dtype=torch.float8_e4m3fn))
    (name,) = (name for name in zipfile.ZipFile(io.BytesIO(blob)).namelist() if name.endswith("data.pkl"))
    pickled = zipfile.ZipFile(io.BytesIO(blob)).read(name)
    refuse(TorchSerializer, rebuilt(blob, data_pkl=pickled.replace(b"torch\nfloat8_e4m3fn", b"torch\n_dynamo")))
    assert asked == []


def test_a_long_header_of_safetensors_is_not_parsed() -> None:
    blob = saved(torch.zeros(SPEC.blob_shape(3)), SafetensorsSerializer)
    header = blob[8 : 8 + int.from_bytes(blob[:8], "little")].ljust(5_000)
    refuse(SafetensorsSerializer, len(header).to_bytes(8, "little") + header + blob[-1024:], "header of more")
