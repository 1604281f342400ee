"""Requirements of serializers that save the core a copy, or decode layer by layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvloom import Chunk, CorruptBlobError, MemoryFormat, Serializer
from kvloom_testkit.chunks import bits, outline, room_for
from kvloom_testkit.requirements import needs
from kvloom_testkit.serializers.models import for_every_model, usual_chunk


class LayerRequirements:
    """Mixed into `SerializerConformance`."""

    @needs("view")
    def test_S13_a_view_is_the_same_as_decoding(self, opened: Callable[[], Serializer]) -> None:
        """`view` equals the result of `decode`, shares the payload's memory, and is refused for a blob that does not
        fit.

        Why: the blob's memory becomes the chunk's.

        Usually: the tensor is copied, or is the beginning of a blob that is too long.
        """
        seen = False
        for _, one in for_every_model(opened()):
            chunk = usual_chunk(one)
            payload, into = bytearray(b"".join(map(bytes, one.encode(chunk)))), room_for(chunk)
            one.decode(one.encode(chunk), into)
            for name, other in {"short": payload[:-1], "long": payload + b"\0", "empty": bytearray()}.items():
                assert _refused(one, other, chunk), f"a payload that is too {name} was accepted"
            view = one.view(memoryview(payload), outline(chunk))
            if view is None:
                continue
            seen = True
            about = (view.tensor.shape, view.tensor.dtype, view.format, view.num_tokens, view.fidelity)
            assert about == (chunk.tensor.shape, chunk.tensor.dtype, chunk.format, chunk.num_tokens, chunk.fidelity)
            assert torch.equal(bits(view), bits(into))
            for at in (0, len(payload) // 2, len(payload) - 1):
                payload[at] ^= 0xFF
                assert int(bits(view)[at]) == payload[at], "the tensor is not the memory of the payload"
        if not seen:
            pytest.skip("with these settings it has no views")

    @needs("by_layer")
    def test_S14_layers_one_by_one_are_the_whole(self, opened: Callable[[], Serializer]) -> None:
        """The buffers of any adjacent layers decode to these layers, in memory that is not contiguous.

        Why: the first layer is in use while the others are still being read.

        Usually: a plane is forgotten, layers are counted from the beginning of the chunk and not of the range, or
        `into` is taken to be contiguous.
        """
        seen = 0
        for _, one in for_every_model(opened()):
            if MemoryFormat.KV_BLOB not in one.formats:
                continue
            for num_tokens in (1, 100):
                chunk = usual_chunk(one, num_tokens)
                blob, params = one.encode(chunk), json.loads(json.dumps(dict(one.params)))
                lengths = [memoryview(buffer).nbytes for buffer in blob]
                numbers = one.layer_buffers(lengths, outline(chunk), params)
                if numbers is None:
                    continue
                seen += 1
                whole = room_for(chunk)
                one.decode(blob, whole)
                _check_ranges(one, [bytes(buffer) for buffer in blob], [list(each) for each in numbers], whole)
        assert seen, "it claims by_layer, and no blob of any model could be read by layers"


def _refused(one: Serializer, payload: bytearray, like: Chunk) -> bool:
    try:
        return one.view(memoryview(payload), outline(like)) is None
    except CorruptBlobError:
        return True


def _check_ranges(one: Serializer, blob: list[bytes], numbers: list[list[int]], whole: Chunk) -> None:
    num_layers = whole.tensor.shape[1]
    assert len(numbers) == num_layers, f"buffers of {len(numbers)} layers, not {num_layers}"
    assert all(0 <= each < len(blob) for layer in numbers for each in layer), "there is no such buffer"
    for start in range(num_layers):
        for stop in range(start + 1, num_layers + 1):
            wanted = sorted({each for layer in numbers[start:stop] for each in layer})
            room = room_for(whole)
            into = replace(room, tensor=room.tensor[:, start:stop])
            one.decode_layers([blob[each] for each in wanted], range(start, stop), into)
            expected = room_for(whole)
            expected.tensor[:, start:stop] = whole.tensor[:, start:stop]
            assert torch.equal(bits(room), bits(expected)), f"layers {start} to {stop} of {num_layers}"
            if wanted and blob[wanted[-1]]:
                cut = [blob[each] for each in wanted[:-1]] + [blob[wanted[-1]][:-1]]
                with pytest.raises(CorruptBlobError):
                    one.decode_layers(cut, range(start, stop), replace(room_for(whole), tensor=into.tensor.clone()))
