"""Requirements on a serializer's description of itself, and on the effect of its settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvloom import EXACT, Chunk, CorruptBlobError, MemoryFormat, Serializer, canonical_json
from kvloom_testkit.chunks import bits, outline, room_for
from kvloom_testkit.process_state import left_as_it_is
from kvloom_testkit.remaking import with_other_settings
from kvloom_testkit.serializers.models import usual_chunk

Opened = Callable[[], Serializer]


class SettingsRequirements:
    """Mixed into `SerializerConformance`."""

    def test_S15_params_are_json(self, opened: Opened) -> None:
        """`params` has JSON values, always the same ones.

        Why: they are written into the header of every blob, and passed to its decoder.

        Usually: it contains a dtype, a path or a set.
        """
        one = opened()
        text = canonical_json(dict(one.params))
        one.encode(_usual(one))
        assert canonical_json(dict(one.params)) == canonical_json(dict(opened().params)) == text

    def test_S20_the_fidelity_says_whether_it_is_lossless(self, opened: Opened) -> None:
        """`fidelity` is `"exact"` if the serializer is lossless, otherwise always the same name.

        Why: it is stored with every chunk, and decides what `exact: true` accepts.

        Usually: only one of the two was overridden.
        """
        one = opened()
        assert (one.fidelity == EXACT) is bool(one.lossless), f"{one.fidelity!r}, lossless: {one.lossless}"
        assert isinstance(one.fidelity, str) and one.fidelity and one.fidelity == opened().fidelity

    def test_S21_settings_are_no_matter_when_decoding(self, opened: Opened) -> None:
        """A blob encoded with other settings of the same type decodes to the same as with those settings, whole or
        layer by layer, or is refused with CorruptBlobError.

        Why: settings change, and stored blobs stay. `decode` receives neither the old settings nor the old `params`.

        Usually: `decode` uses the instance's own level, block size or dtype; or its own `params` instead of the blob's.
        """
        one = opened()
        several = [one]
        for other in with_other_settings(one):
            try:
                other.encode(_usual(other))
            except Exception:  # these settings are invented, and may be refused
                other.close()
            else:
                several.append(other)
        if len(several) == 1:
            pytest.skip("it has no settings that the kit could change")
        for writer in several:
            chunk = _usual(writer)
            blob, expected = [bytes(buffer) for buffer in writer.encode(chunk)], room_for(chunk)
            writer.decode(blob, expected)
            for reader in (each for each in several if chunk.format in each.formats):
                about = f"encoded with {writer.config!r}, decoded as something else with {reader.config!r}"
                got = room_for(chunk)
                with contextlib.suppress(CorruptBlobError):
                    reader.decode(blob, got)
                    assert torch.equal(bits(got), bits(expected)), about
                    got = room_for(chunk)
                    if _decoded_by_layer(reader, blob, dict(writer.params), got):
                        assert torch.equal(bits(got), bits(expected)), f"{about}, layer by layer"
        for other in several[1:]:
            other.close()

    def test_S22_leaves_the_process_as_it_is(self, opened: Opened) -> None:
        """Encoding and decoding change neither logging, signals and warnings, nor random numbers, nor the settings of
        torch.

        Why: it runs beside a model, which depends on these settings.

        Usually: rounding draws from the random numbers that the model samples with, the number of torch's threads is
        set, or a default dtype.
        """
        chunk = _usual(opened())
        with left_as_it_is():
            one = opened()
            one.decode_many(one.encode_many([chunk]), [room_for(chunk)])
            one.close()


def _decoded_by_layer(reader: Serializer, blob: list[bytes], params: dict[str, object], into: Chunk) -> bool:
    """Decode each layer on its own; False if this cannot be done."""
    numbers = None
    if reader.by_layer and into.format is MemoryFormat.KV_BLOB:
        numbers = reader.layer_buffers([len(buffer) for buffer in blob], outline(into), params)
    for layer, wanted in enumerate(numbers or ()):
        view = replace(into, tensor=into.tensor[:, layer : layer + 1])
        reader.decode_layers([blob[number] for number in sorted(set(wanted))], range(layer, layer + 1), view)
    return numbers is not None


def _usual(one: Serializer) -> Chunk:
    return usual_chunk(one)
