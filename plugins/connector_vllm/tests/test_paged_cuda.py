"""The kernel, on a GPU where there is one, else as a loop on a processor: what torch moves, bit for bit."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom import Chunk, ChunkKey, ConfigError, KVSpec, MemoryFormat, Segment
from kvloom_connector_vllm import native, testing
from kvloom_connector_vllm.native import Kernels
from kvloom_connector_vllm.paged import cuda
from kvloom_connector_vllm.paged.connector import PagedConnector
from kvloom_connector_vllm.paged.cuda import PagedCudaConnector
from kvloom_testkit import ConnectorConformance, ConnectorHarness
from kvloom_testkit.connectors.memories import done, same
from kvloom_testkit.subjects import SPEC

CSRC = Path(__file__).parents[1] / "csrc"
few = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if (kernels := native.kernels()) is not None:
        return kernels
    compiler = shutil.which("c++") or pytest.skip("no C++ compiler to run the kernel on a processor with")
    built = tmp_path_factory.mktemp("emulated") / "libkvpaged_emulated.so"
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run([compiler, *options, "-x", "c++", CSRC / "paged.cu", "-o", built], check=True)
    return Kernels.declared(ctypes.CDLL(str(built)), "cpu")


@pytest.fixture(autouse=True)
def there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connectors of a test use them."""
    if "refuses" not in request.node.name and "compile" not in request.node.name:
        found = request.getfixturevalue("found")
        monkeypatch.setattr(cuda, "kernels", lambda: found)
        monkeypatch.setattr(testing, "kernels", lambda: found)


def connector(spec: KVSpec = SPEC, **how: Any) -> PagedCudaConnector:
    return PagedCudaConnector(PagedCudaConnector.Config.model_validate(how), spec)


class TestDirect(ConnectorConformance):
    @pytest.fixture
    def make(self) -> Callable[[], ConnectorHarness]:
        return lambda: testing.paged_cuda(connector)


class TestStaged(ConnectorConformance):
    """In parts, of a few chunks each."""

    @pytest.fixture
    def make(self) -> Callable[[], ConnectorHarness]:
        return lambda: testing.paged_cuda(lambda: connector(use_gpu=True, staging=4096))


@few
@given(
    planes=st.integers(1, 2), layers=st.integers(1, 3), heads=st.integers(1, 5), head_size=st.integers(1, 40),
    dtype=st.sampled_from(["float64", "float32", "bfloat16", "float8_e4m3fn", "uint8"]), size=st.integers(1, 9),
    tokens_first=st.booleans(), use_gpu=st.booleans(), pinned=st.booleans(),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    layer=st.booleans(), holes=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_it_moves_what_torch_moves(
    found: Kernels, planes: int, layers: int, heads: int, head_size: int, dtype: str, size: int, tokens_first: bool,
    use_gpu: bool, pinned: bool, sizes: list[int], layer: bool, holes: bool, seed: int,
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
    there, kernel = host.to(found.device_type), connector(spec, layout=name, use_gpu=use_gpu, staging=1 << 12)
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


@pytest.mark.parametrize("use_gpu", [False, True])
def test_the_kernel_itself_goes_to_host_memory_unless_use_gpu(
    found: Kernels, use_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids = []
    queue = Kernels.queue
    monkeypatch.setattr(
        Kernels, "queue", lambda *of, blocks, **how: grids.append(blocks) or queue(*of, blocks=blocks, **how)
    )
    it = testing.paged_cuda(lambda: connector(use_gpu=use_gpu))
    segments = it.segments(16, 16)
    chunks = [Chunk(room(SPEC, 16, found, True).tensor, MemoryFormat.KV_BLOB, 16) for _ in segments]
    done(it.connector.read(segments, chunks, **it.engine().where))
    assert grids == [cuda._BLOCKS_ON_DEVICE if use_gpu else cuda._BLOCKS]


def test_chunks_that_the_device_cannot_reach_are_staged(found: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    it = testing.paged_cuda(connector)
    source, target = it.engine(), it.engine(blank=True)
    segments = it.segments(16, 16, 8)
    monkeypatch.setattr(Kernels, "address", lambda self, tensor: None)
    it.write(segments, it.read(segments, source), target)
    assert same(target.kv(), source.kv())


def test_nothing_is_under_way_when_a_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller takes the chunks back after an error. The stream only records the calls."""
    asked: list[Any] = []
    stream = SimpleNamespace(wait_stream=asked.append, synchronize=lambda: asked.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "stream", lambda one: contextlib.nullcontext())
    device, one = torch.device("cuda", 0), connector()
    one._streams[device] = stream  # type: ignore[assignment]
    with one._on_stream(device, "the engine's"):  # type: ignore[arg-type]
        pass
    assert asked == ["the engine's"]
    with pytest.raises(MemoryError), one._on_stream(device, "the engine's"):  # type: ignore[arg-type]
        raise MemoryError
    assert asked == ["the engine's", "the engine's", "synchronize"]


@pytest.mark.skipif(native.kernels() is None, reason="there is no GPU, and so there are no streams")
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("use_gpu", [False, True])
def test_what_the_engine_has_queued_is_done_first(named: bool, use_gpu: bool) -> None:
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
            done(connector(use_gpu=use_gpu).read([segment], [chunk], **where))
    if named:
        done(connector(use_gpu=use_gpu).read([segment], [chunk], **where, stream=stream))
    assert (chunk.tensor == 3).all()


def test_a_move_in_parts_is_the_whole_move() -> None:
    chunks = [torch.zeros(2, 1, tokens, 4, dtype=torch.uint8) for tokens in (1, 2, 3, 9, 1)]
    move = cuda.Move(None, torch.arange(16).numpy(), chunks, True)  # type: ignore[arg-type]
    parts = list(cuda._parts(move, 30))
    assert [[chunk.shape[2] for chunk in part.chunks] for part in parts] == [[1, 2], [3], [9], [1]]
    assert [part.slots.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], list(range(6, 15)), [15]]


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
    with pytest.raises(RuntimeError, match="refused"):
        found.queue(native._Move(), word=1, blocks=1, stream=0)


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
    assert "| write: paged_cuda, use_gpu | 8 |" in done.stdout


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
