"""The kernel, on a GPU where there is one, else as a loop on a processor: what torch moves, bit for bit."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import Chunk, ChunkKey, ConfigError, Engine, KVSpec, MemoryFormat, Registry, Segment
from kvloom_connector_vllm import native, testing
from kvloom_connector_vllm.native import Kernels
from kvloom_connector_vllm.paged import bounce, cuda
from kvloom_connector_vllm.paged.connector import PagedConnector
from kvloom_connector_vllm.paged.cuda import PagedCudaConnector
from kvloom_testkit import ConnectorConformance, ConnectorHarness
from kvloom_testkit.connectors.memories import done, same
from kvloom_testkit.devices.simulated import SimulatedDevice
from kvloom_testkit.subjects import SPEC

CSRC = Path(__file__).parents[1] / "csrc"
few = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="session")
def found(for_a_processor: Callable[..., Path]) -> Kernels:
    if (kernels := native.kernels()) is not None:
        return kernels
    built = for_a_processor(CSRC / "paged.cu", "-O1", "-Wall", "-Wextra", "-Werror")
    return Kernels(ctypes.CDLL(str(built)), "cpu")


@pytest.fixture(autouse=True)
def there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The connectors of a test use them; where there is no GPU, on a device that does everything as late as it may."""
    if "refuses" in request.node.name or "compile" in request.node.name:
        yield
        return
    found = request.getfixturevalue("found")
    monkeypatch.setattr(cuda, "kernels", lambda: found)
    monkeypatch.setattr(testing, "kernels", lambda: found)
    with SimulatedDevice(7).installed() if found.device_type == "cpu" else contextlib.nullcontext():
        yield


def connector(spec: KVSpec = SPEC, **how: Any) -> PagedCudaConnector:
    return PagedCudaConnector(PagedCudaConnector.Config.model_validate(how), spec)


class TestAtOnce(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], ConnectorHarness]:
        return lambda: testing.paged_cuda(connector)


class TestInParts(ConnectorConformance):
    """The buffers hold a few chunks, so that a move has several parts."""

    @pytest.fixture
    def make(self) -> Callable[[], ConnectorHarness]:
        return lambda: testing.paged_cuda(lambda: connector(staging=4096))


@few
@given(
    planes=st.integers(1, 2), layers=st.integers(1, 3), heads=st.integers(1, 5), head_size=st.integers(1, 40),
    dtype=st.sampled_from(["float64", "float32", "bfloat16", "float8_e4m3fn", "uint8"]), size=st.integers(1, 9),
    tokens_first=st.booleans(), pinned=st.booleans(),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    layer=st.booleans(), holes=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_it_moves_what_torch_moves(
    found: Kernels, planes: int, layers: int, heads: int, head_size: int, dtype: str, size: int, tokens_first: bool,
    pinned: bool, sizes: list[int], layer: bool, holes: bool, seed: int,
) -> None:  # fmt: skip
    """Words of 1 to 16 bytes, heads side by side and apart, chunks in pinned memory and in other."""
    spec = KVSpec("m", layers, heads, head_size, dtype, kv_planes=planes)
    generator = torch.Generator().manual_seed(seed)
    middle = (size, heads) if tokens_first else (heads, size)
    count, name = sum(sizes), "nhd" if tokens_first else "hnd"
    shape = (layers, planes, count // size + 2, *middle, head_size)
    host = torch.randint(0, 256, (*shape[:-1], head_size * spec.torch_dtype.itemsize), dtype=torch.uint8,
                         generator=generator).view(spec.torch_dtype)  # fmt: skip
    slots = torch.randperm(shape[2] * size, generator=generator)[:count]
    segments, at = [], 0
    for each in sizes:
        segments.append(Segment(at, at + each, ChunkKey("0/-", len(segments), bytes(32))))
        at += each
    there, kernel = host.to(found.device_type), connector(spec, layout=name, staging=1 << 12)
    torchs = PagedConnector(PagedConnector.Config(layout=name), spec)
    one, other = ([room(spec, each, found, pinned) for each in sizes] for _ in range(2))
    fence = kernel.read(segments, one, kvcaches=list(map(tuple, there)), slot_mapping=slots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "processor", lambda: None)
        torchs.read(segments, other, kvcaches=list(map(tuple, host)), slot_mapping=slots)
        done(fence)
        assert all(same(a.tensor, b.tensor) for a, b in zip(one, other, strict=True))
        if holes:
            slots[torch.rand(count, generator=generator) < 0.3] = -1
        there.view(torch.uint8).fill_(7)
        host.view(torch.uint8).fill_(7)
        for connector_, kvcaches, chunks in ((kernel, there, one), (torchs, host, other)):
            where = {"kvcaches": list(map(tuple, kvcaches)), "slot_mapping": slots}
            if layer:
                parts = [Chunk(c.tensor[:, :1], c.format, c.num_tokens) for c in chunks]
                done(connector_.write_layer(0, segments, parts, **where))
            else:
                done(connector_.write(segments, chunks, **where))
    assert same(there, host)


def room(spec: KVSpec, tokens: int, found: Kernels, pinned: bool) -> Chunk:
    pinned = pinned and found.device_type == "cuda"
    tensor = torch.empty(spec.blob_shape(tokens), dtype=spec.torch_dtype, pin_memory=pinned)
    return Chunk(tensor, MemoryFormat.KV_BLOB, tokens)


@pytest.mark.skipif(native.kernels() is None, reason="there is no GPU, and so there are no streams")
@pytest.mark.parametrize("named", [False, True])
def test_what_the_engine_has_queued_is_done_first(named: bool) -> None:
    """On the calling thread's stream, or on the one that is named. The chunk is pinned: no copy waits by itself."""
    pages, planes = testing.joined(SPEC, 8, "cuda")
    chunk = Chunk(torch.zeros(SPEC.blob_shape(16), dtype=SPEC.torch_dtype).pin_memory(), MemoryFormat.KV_BLOB, 16)
    segment, stream = Segment(0, 16, ChunkKey("0/-", 0, bytes(32))), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**9)
        for view in (view for layers in planes for view in layers):
            view.fill_(3)
        where = {"kvcaches": pages, "slot_mapping": torch.arange(16)}
        if not named:
            done(connector().read([segment], [chunk], **where))
    if named:
        done(connector().read([segment], [chunk], **where, stream=stream))
    assert (chunk.tensor == 3).all()


@pytest.mark.skipif(native.kernels() is None, reason="there is no GPU, and so there are no streams")
def test_readers_that_the_engine_has_queued_see_what_was_there() -> None:
    """A load comes after them."""
    pages, planes = testing.joined(SPEC, 8, "cuda")
    chunk = Chunk(torch.ones(SPEC.blob_shape(16), dtype=SPEC.torch_dtype).pin_memory(), MemoryFormat.KV_BLOB, 16)
    segment, stream = Segment(0, 16, ChunkKey("0/-", 0, bytes(32))), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**9)
        seen = [view.clone() for layers in planes for view in layers]
        done(connector().write([segment], [chunk], kvcaches=pages, slot_mapping=torch.arange(16)))
        now = [view.clone() for layers in planes for view in layers]
    torch.cuda.synchronize()
    assert not any(view.any() for view in seen) and all((view[:4] == 1).all() for view in now)


@pytest.mark.skipif(native.kernels() is None, reason="there is no GPU, and so there are no streams")
@pytest.mark.parametrize("kind", ["paged", "paged_cuda"])
def test_saves_and_loads_in_the_background_come_after_what_is_queued(kind: str) -> None:
    """On the stream of the thread that calls: the thread that copies has another."""
    pages, planes = testing.joined(SPEC, 64, "cuda")
    views = [view for layers in planes for view in layers]
    plugins = [EntryPoint(name, name, "kvloom.v1") for name in ("kvloom.builtin", "kvloom_connector_vllm")]
    registry = Registry.discover(entry_points=plugins)
    where = {"kvcaches": pages, "slot_mapping": torch.arange(256)}
    with Engine.open({"connector": {"type": kind}}, SPEC, registry=registry) as engine:
        segments, stream = engine.segments(torch.arange(256)), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**9)
            for view in views:
                view.fill_(3)
            save = engine.save(segments, **where)
            assert save.result(60).all()
            for view in views:
                view.fill_(5)
            torch.cuda._sleep(10**9)
            seen = [view.clone() for view in views]
            load = engine.load(segments, **where)
            assert load.result(60).all()
        torch.cuda.synchronize()
        assert all((view == 5).all() for view in seen), "a load came before readers"
        assert all((view == 3).all() for view in views), "a save came before writers"


@pytest.mark.skipif(native.kernels() is None, reason="there is no GPU, and so there are no streams")
@pytest.mark.parametrize("to_pages", [False, True])
def test_a_buffer_is_not_used_again_before_it_is_free(to_pages: bool) -> None:
    """More chunks than the buffers hold, in a loop, beside another stream's copies that keep the bus busy."""
    generator = torch.Generator("cuda").manual_seed(0)
    pages, _ = testing.joined(SPEC, 4096, "cuda")
    for layer in pages:
        layer.copy_(torch.randint(0, 99, layer.shape, device="cuda", generator=generator).to(layer.dtype))
    segments = [Segment(n * 64, (n + 1) * 64, ChunkKey("0/-", n, bytes(32))) for n in range(64)]
    slots = torch.randperm(64 * 64)
    fast, slow = connector(staging=1 << 16), PagedConnector(PagedConnector.Config(), SPEC)
    mine, theirs = ([room(SPEC, 64, native.Kernels(None), True) for _ in segments] for _ in range(2))  # type: ignore[arg-type]
    slow.read(segments, theirs, kvcaches=pages, slot_mapping=slots)
    where = {"kvcaches": pages, "slot_mapping": slots}
    for _ in range(20):
        if to_pages:
            expected = [layer.clone() for layer in pages]
            for layer in pages:
                layer[:1024] = 0
            done(fast.write(segments, theirs, **where))
            assert all(map(same, pages, expected))
        else:
            done(fast.read(segments, mine, **where))
            assert all(same(a.tensor, b.tensor) for a, b in zip(mine, theirs, strict=True))
            for chunk in mine:
                chunk.tensor.zero_()


def test_the_tables_of_a_move_are_made_and_copied_once(found: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parts it has."""
    made: list[native.Tables] = []
    placed = Kernels._placed
    monkeypatch.setattr(Kernels, "_placed", lambda self, tables: made.append(tables) or placed(self, tables))
    it = testing.paged_cuda(lambda: connector(staging=4096))
    segments, memory = it.segments(*[8] * 5), it.engine()
    chunks = it.read(segments, memory)
    assert len(made) == 1 and all(
        same(chunk.tensor, it.part(memory.kv(), segment)) for segment, chunk in zip(segments, chunks, strict=True)
    )
    it.write(segments, chunks, memory)
    assert len(made) == 2


def test_parts_are_all_chunks_once_and_fit_into_a_buffer() -> None:
    chunks = [torch.zeros(size, dtype=torch.uint8) for size in (100, 256, 257, 2000, 1, 1)]
    parts = [(first, [len(chunk) for chunk in some]) for first, some in bounce._parts(chunks, 1024)]
    assert parts == [(0, [100, 256, 257]), (3, [2000]), (4, [1, 1])]
    assert list(bounce._parts([], 1024)) == []


def test_pages_that_are_not_on_a_gpu_are_refused(found: Kernels) -> None:
    it = testing.paged_cuda(connector)
    elsewhere = "meta" if found.device_type == "cpu" else "cpu"
    where = it.engine().where
    kvcaches = [layer.to(elsewhere) for layer in where["kvcaches"]]
    with pytest.raises(ValueError, match=f"kvcaches: on {elsewhere}; paged_cuda takes those of a GPU"):
        it.connector.check({**where, "kvcaches": kvcaches}, 8)
    with pytest.raises(ValueError, match="stream: expected a torch"):
        it.connector.check({**where, "stream": 7}, 8)


def test_the_kernel_refuses_numbers_that_make_no_sense(found: Kernels) -> None:
    none = np.zeros((0, 4), dtype=np.int64)
    with pytest.raises(RuntimeError, match="refused"):
        found.launch(native.Tables(none, none, none[:, 0], none[:, 0].astype(np.int32), 0, 0, 0, 0, 0, False))


@pytest.mark.skipif(native.kernels() is not None, reason="there is a GPU")
def test_it_refuses_to_start_without_a_gpu_and_says_what_to_use() -> None:
    with pytest.raises(ConfigError, match=r"connector.type: paged_cuda needs a GPU \(built with.*\); use type: paged"):
        connector()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to run the kernel on a processor with")
def test_the_benchmark_compiles_and_runs() -> None:
    """Small, on a processor. It asserts that what it measures moves the KV."""
    script = Path(__file__).parents[3] / "bench" / "paged_gpu.py"
    done = subprocess.run([sys.executable, script, "--rehearse"], capture_output=True, text=True, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert "| write: type: vllm | 8 |" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here: the kernels are not compiled by it")
def test_the_kernels_compile_and_load_without_a_driver(tmp_path: Path) -> None:
    done = configured(tmp_path, environment(), "-DKVLOOM_PAGED_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90-real")
    assert done.returncode == 0, done.stderr
    subprocess.run(["ninja", "-C", tmp_path], env=environment(), check=True, capture_output=True)
    assert ctypes.CDLL(str(tmp_path / "libkvpaged_cuda.so")).kvp_cuda_devices() != 0  # so many, or no driver


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["a C++ compiler", "no compiler"])
def test_what_is_built_without_nvcc_compiles_and_says_so(tmp_path: Path, compiler: str) -> None:
    """And without any compiler, the plugin is plain Python."""
    names = ["cmake", "ninja", "uname", "sh"]
    names += ["c++", "g++", "gcc", "cc", "as", "ld", "ar", "ranlib"] if compiler == "a C++ compiler" else []
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in names:
        if (tool := shutil.which(name, path=environment()["PATH"])) is not None:
            (tools / name).symlink_to(tool)
    poor = {"PATH": str(tools), "HOME": str(tmp_path)}
    done = configured(tmp_path / "auto", poor)
    said = " ".join(done.stderr.split())
    assert done.returncode == 0, said
    assert "is built without CUDA, because there is no nvcc" in said
    assert ("without its libraries, because there is no C++ compiler" in said) == (compiler == "no compiler")
    for step in ("--build", "--install"):
        subprocess.run(["cmake", step, tmp_path / "auto"], env=poor, check=True, capture_output=True)
    libraries = [path.name for path in (tmp_path / "auto" / "there").glob("lib*")]
    assert len(libraries) == (compiler == "a C++ compiler")
    done = configured(tmp_path / "on", poor, "-DKVLOOM_PAGED_CUDA=ON")
    assert done.returncode != 0 and "there is no nvcc: install the CUDA toolkit" in " ".join(done.stderr.split())


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def configured(build: Path, env: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", CSRC, "-B", build, "-G", "Ninja", f"-DCMAKE_INSTALL_PREFIX={build / 'there'}", *options]
    return subprocess.run(command, env=env, capture_output=True, text=True)
