"""Requirements of serializers. See `SerializerConformance`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from kvloom import Chunk, MemoryFormat, Place, Serializer
from kvloom_testkit import effort
from kvloom_testkit.chunks import (
    PAGES,
    POISONS,
    Guarded,
    astray,
    bits,
    chunk_of,
    finite_chunks,
    outline,
    pages_of,
    room_for,
    uneven_chunks,
)
from kvloom_testkit.conformance import Conformance
from kvloom_testkit.remaking import elsewhere, once_more
from kvloom_testkit.requirements import needs
from kvloom_testkit.running import in_rounds
from kvloom_testkit.serializers.blobs import BytesRequirements
from kvloom_testkit.serializers.layers import LayerRequirements
from kvloom_testkit.serializers.models import REAL_TOKENS, for_every_model, of_real_size, usual_chunk
from kvloom_testkit.serializers.settings import SettingsRequirements

TOKENS = (1, 7, 16)
ROUNDS = 12
ROUNDS_SECONDS = 1.0
"""Target time of one thread's work: a serializer that takes longer for all rounds runs fewer."""

Opened = Callable[[], Serializer]


def decoded(serializer: Serializer, chunk: Chunk, poison: int = POISONS[0]) -> torch.Tensor:
    """The bytes of what `decode` makes of what `encode` made of a chunk."""
    into = room_for(chunk, poison)
    serializer.decode(serializer.encode(chunk), into)
    return bits(into)


class SerializerConformance(BytesRequirements, LayerRequirements, SettingsRequirements, Conformance):
    """Requirements of a `Serializer`.

    `make` is a function that makes a new instance each time it is called. The tests make more instances from its class,
    settings and model, also for models of other shapes and dtypes; its constructor raises ValueError for a model that
    it does not support.
    """

    kind = "serializer"
    contract = Serializer

    @needs("lossless")
    def test_S01_every_bit_comes_back(self, opened: Opened) -> None:
        """Decoding returns every bit, for every supported model, and any number of tokens.

        Why: `lossless` is claimed, and the KV counts as computed by the engine.

        Usually: values are converted on the way, which changes NaNs; or a last odd token, or the part beyond a block,
        is left out.
        """
        for spec, one in for_every_model(opened()):
            if MemoryFormat.KV_BLOB in one.formats:
                for num_tokens in TOKENS:
                    chunk = chunk_of(spec, num_tokens)
                    same = torch.equal(decoded(one, chunk), bits(chunk))
                    assert same, f"{num_tokens} tokens of {list(chunk.tensor.shape)}, {spec.dtype}"
        for spec, one in of_real_size(opened()):
            for num_tokens in REAL_TOKENS:
                chunk = chunk_of(spec, num_tokens)
                assert torch.equal(decoded(one, chunk), bits(chunk)), f"{list(chunk.tensor.shape)}, {spec.dtype}"

    def test_S02_what_is_lost_is_the_same_every_time(self, opened: Opened) -> None:
        """[lossy] Decoding a blob gives the same bits each time, in every instance, and finite ones for finite values.
        For usual values, the result is nearer to the positive ones, and to the negative ones, than zeros would be;
        and each layer of K and of V keeps its magnitude, also if one is much larger than the other.

        Why: a chunk that is read twice must be the same chunk, and one infinity spoils every token after it.

        Usually: noise is added when decoding, the largest values overflow in the narrower type, a sign or a scale is
        lost, or a scale of another layer or plane is used.
        """
        if opened().lossless:
            pytest.skip("it claims lossless")
        for spec, one in for_every_model(opened()):
            other = once_more(one)
            for name, chunk in finite_chunks(spec).items():
                blob, first, second = one.encode(chunk), room_for(chunk, POISONS[0]), room_for(chunk, POISONS[1])
                one.decode(blob, first)
                other.decode(blob, second)
                assert torch.equal(bits(first), bits(second)), f"{name}, {spec.dtype}"
                assert bool(first.tensor.double().isfinite().all()), f"{name} of {spec.dtype} are not finite any more"
                if name == "usual values":
                    back, given = first.tensor.double(), chunk.tensor.double()
                    for sign, some in (("positive", given > 0), ("negative", given < 0)):
                        near = (back[some] - given[some]).norm() < given[some].norm()
                        assert near, f"of {sign} values in {spec.dtype} nothing is left"
            for name, chunk in uneven_chunks(spec).items():
                back = room_for(chunk)
                one.decode(one.encode(chunk), back)
                assert not (wrong := astray(back, chunk)), f"{name}, {spec.dtype}: {wrong}"
            other.close()
        for spec, one in of_real_size(opened()):
            for num_tokens in REAL_TOKENS:
                chunk = finite_chunks(spec, num_tokens)["usual values"]
                first, second = (decoded(one, chunk, poison) for poison in POISONS[:2])
                assert torch.equal(first, second), f"{list(chunk.tensor.shape)}, {spec.dtype}"

    def test_S03_encoding_leaves_the_chunk_as_it_is(self, opened: Opened) -> None:
        """`encode` changes nothing in the chunk.

        Why: the chunk in memory is shared, and is served while it is written.

        Usually: values are scaled or cleaned in place.
        """
        one = opened()
        for seed in range(2):
            chunk = usual_chunk(one, seed=seed)
            before = bits(chunk)
            one.encode(chunk)
            one.encode_many([chunk])
            assert torch.equal(bits(chunk), before)

    def test_S04_decoding_fills_the_whole_chunk(self, opened: Opened) -> None:
        """`decode` writes every byte of `into`, whatever its old content.

        Why: its memory held another request's KV a moment ago.

        Usually: zeros are left out, because fresh memory is taken to be zero.
        """
        for spec, one in for_every_model(opened()):
            chunks = [usual_chunk(one)]
            if MemoryFormat.KV_BLOB in one.formats:
                chunks.append(Chunk(torch.zeros(spec.blob_shape(5)).to(spec.torch_dtype), MemoryFormat.KV_BLOB, 5))
            for chunk in chunks:
                first, *others = (decoded(one, chunk, poison) for poison in POISONS)
                assert all(torch.equal(first, other) for other in others), f"{spec.dtype}"

    def test_S05_decoding_writes_nothing_else(self, opened: Opened) -> None:
        """`decode` writes nothing before or after `into`, in the memory that it is a view of.

        Why: another chunk may be adjacent.

        Usually: lengths are rounded up, or the tensor's storage is written instead of the view.
        """
        for _, one in for_every_model(opened()):
            for num_tokens in (1, 7):
                chunk = usual_chunk(one, num_tokens)
                room = Guarded.around(chunk, POISONS[-1])
                one.decode(one.encode(chunk), room.chunk)
                assert room.intact, f"{list(chunk.tensor.shape)}"

    def test_S08_no_blob_is_longer_than_it_says(self, opened: Opened) -> None:
        """`max_encoded_bytes` is an upper bound of the bytes of all buffers; a chunk on `meta` has the same.

        Why: memory is reserved by it, and a longer blob counts as damaged: it would be written and never read.

        Usually: it ignores a header, or assumes that every chunk compresses.
        """
        for spec, one in for_every_model(opened()):
            chunks = [usual_chunk(one, num_tokens) for num_tokens in (*TOKENS, 100)]
            chunks += finite_chunks(spec).values() if MemoryFormat.KV_BLOB in one.formats else ()
            for chunk in chunks:
                longest, nbytes = one.max_encoded_bytes(outline(chunk)), _length(one, chunk)
                assert one.max_encoded_bytes(chunk) == longest, "on meta it is another"
                assert nbytes <= longest, f"{nbytes} bytes for {list(chunk.tensor.shape)} of {spec.dtype}"

    def test_S09_threads_do_not_disturb_each_other(self, opened: Opened) -> None:
        """Encoding and decoding on several threads at once gives the same results as on one.

        Why: a tier has one serializer and several threads.

        Usually: a buffer, a stream or a compressor is kept on the instance; some of them even crash the process.
        """
        _decodes_on_threads(opened(), 40, restless=True)
        for _, one in of_real_size(opened()):
            _decodes_on_threads(one, REAL_TOKENS[0], restless=False)

    def test_S10_nothing_is_remembered_between_calls(self, opened: Opened) -> None:
        """A blob decodes on its own: in a new instance, in any order, whatever was encoded before.

        Why: blobs are read in another order, by another process, and some of them are gone.

        Usually: a chunk is stored as its difference to the one before, or a dictionary is kept on the instance.
        """
        one = opened()
        chunks = [usual_chunk(one, seed=seed) for seed in range(3)]
        blobs = [[bytes(buffer) for buffer in one.encode(chunk)] for chunk in chunks]
        expected = [decoded(opened(), chunk) for chunk in chunks]
        for reader in (opened(), one):
            for number in (2, 0, 1, 1):
                into = room_for(chunks[number])
                reader.decode(blobs[number], into)
                assert torch.equal(bits(into), expected[number]), f"blob {number}"

    def test_S11_another_process_decodes_it(self, opened: Opened, tmp_path: Path) -> None:
        """A fresh interpreter, with another hash seed and environment, decodes what this one encoded.

        Why: blobs outlive the process, and other hosts share them.

        Usually: decoding needs a value that was drawn at random, or depends on a hash.
        """
        one = opened()
        chunk = usual_chunk(one)
        for number, buffer in enumerate(one.encode(chunk)):
            (tmp_path / f"{number:06}").write_bytes(buffer)
        code = (
            "import pathlib\nfrom kvloom_testkit.chunks import bits, room_for\n"
            "from kvloom_testkit.serializers.models import usual_chunk\n"
            "into = room_for(usual_chunk(component))\n"
            "files = sorted(pathlib.Path(sys.argv[2]).iterdir())\n"
            "component.decode([file.read_bytes() for file in files], into)\n"
            "print(bits(into).numpy().tobytes().hex())\n"
        )
        assert elsewhere(one, code, str(tmp_path)).strip() == decoded(one, chunk).numpy().tobytes().hex()

    def test_S12_many_at_once_are_the_same_as_one_by_one(self, opened: Opened) -> None:
        """`encode_many` and `decode_many` equal `encode` and `decode` one by one, in order.

        Why: the core calls whichever is faster.

        Usually: the shape of the first chunk is taken for that of all, though the last one may be shorter.
        """
        one = opened()
        chunks = [usual_chunk(one, num_tokens, seed=seed) for seed, num_tokens in enumerate((16, 16, 5))]
        expected = [decoded(one, chunk) for chunk in chunks]
        for place in (None, Place(torch.device("cpu"))):
            blobs, rooms = one.encode_many(chunks, place), [room_for(chunk) for chunk in chunks]
            assert len(blobs) == len(chunks)
            for blob, room, bytes_ in zip(blobs, rooms, expected, strict=True):
                one.decode(blob, room)
                assert torch.equal(bits(room), bytes_), "encode_many"
            rooms = [room_for(chunk) for chunk in chunks]
            one.decode_many([one.encode(chunk) for chunk in chunks], rooms, place)
            assert all(map(torch.equal, map(bits, rooms), expected)), "decode_many"
        assert one.encode_many([]) == []

    def test_S17_closing_twice_is_fine(self, opened: Opened) -> None:
        """`close` may be called twice, also on an instance that was never used.

        Why: an engine that fails to open closes what it has, and then its owner closes the engine.

        Usually: the resource is set to None, and then closed again.
        """
        used = opened()
        used.encode(usual_chunk(used))
        for one in (used, opened()):
            one.close()
            one.close()

    def test_S19_pages_are_opaque(self, opened: Opened) -> None:
        """[KV_PAGES] Pages of any shape come back bit for bit, also if the serializer is lossy otherwise.

        Why: only the engine knows the meaning of their bytes. A serializer that needs it omits KV_PAGES from `formats`,
        and is refused when the engine opens.

        Usually: `formats` was left at its default, which is everything.
        """
        assert opened().formats and opened().formats <= frozenset(MemoryFormat)
        if MemoryFormat.KV_PAGES not in opened().formats:
            pytest.skip("it does not claim KV_PAGES")
        for spec, one in for_every_model(opened()):
            for chunk in (pages_of(spec, shape) for shape in PAGES):
                assert torch.equal(decoded(one, chunk), bits(chunk)), f"{list(chunk.tensor.shape)} of {spec.dtype}"


def _decodes_on_threads(one: Serializer, num_tokens: int, *, restless: bool) -> None:
    """Check that each thread decodes its chunks to the same as a single thread; as many rounds as there is time for."""
    chunks = [usual_chunk(one, num_tokens + number, seed=number) for number in range(4)]
    began = time.monotonic()
    expected = [decoded(one, chunk) for chunk in chunks]
    took = time.monotonic() - began
    count = effort.rounds(min(ROUNDS, max(2, int(ROUNDS_SECONDS / took)))) or 1
    wrong = [0] * len(chunks)

    def work(thread: int, number: int) -> None:
        wrong[thread] += not torch.equal(decoded(one, chunks[thread], POISONS[1]), expected[thread])

    in_rounds(count, *(partial(work, thread) for thread in range(len(chunks))), restless=restless)
    assert not any(wrong), f"of {count} chunks of each thread so many came back as something else: {wrong}"


def _length(serializer: Serializer, chunk: Chunk) -> int:
    return sum(memoryview(buffer).nbytes for buffer in serializer.encode(chunk))
