"""Requirements of connectors that move KV layer by layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvloom_testkit.connectors.memories import ConnectorHarness, done, layer_of, same
from kvloom_testkit.requirements import needs


class LayerRequirements:
    """Mixed into `ConnectorConformance`."""

    @needs("read_layer")
    def test_C10_reading_layers_one_by_one_is_reading_all(self, opened: Callable[[], ConnectorHarness]) -> None:
        """`read_layer` fills the view of one layer, whose planes are not adjacent, and no other layer. It raises
        ValueError like `check`.

        Why: layers are stored while later ones are still being computed, so they cannot be checked before.

        Usually: the view is taken to be contiguous, so that a copy of it is filled; or layers are counted wrongly.
        """
        it = opened()
        memory, segments = it.engine(), it.segments(16, 5, start=3, gap=2)
        num_layers, kv = it.spec.num_layers, memory.kv()
        for layer in reversed(range(num_layers)):
            chunks, expected = it.chunks(segments), it.chunks(segments)
            done(it.connector.read_layer(layer, segments, [layer_of(c, layer) for c in chunks], **memory.where))
            for chunk, untouched, segment in zip(chunks, expected, segments, strict=True):
                layer_of(untouched, layer).tensor.copy_(it.part(kv, segment)[:, layer : layer + 1])
                assert same(chunk.tensor, untouched.tensor), f"layer {layer} of {segment[:2]}"
        small = it.engine(num_tokens=it.page_tokens)
        for where in (small.where, {}):
            with pytest.raises(ValueError):
                done(it.connector.read_layer(0, segments, [layer_of(c, 0) for c in it.chunks(segments)], **where))

    @needs("write_layer")
    def test_C11_writing_layers_one_by_one_is_writing_all(self, opened: Callable[[], ConnectorHarness]) -> None:
        """`write_layer` writes one layer of each segment, from views that are not contiguous, and nothing else.

        Why: layers before it are in use already, on another thread, and layers after it come later.

        Usually: all layers are written, or a layer's place is that of the first.
        """
        it = opened()
        source, target = it.engine(seed=1), it.engine(seed=2)
        segments, kv, expected, around = it.segments(16, 5, 4), source.kv(), target.kv(), target.surroundings()
        chunks = it.read(segments, source)
        for layer in range(it.spec.num_layers):
            for some in (slice(0, 2), slice(2, 3)):
                views = [layer_of(chunk, layer) for chunk in chunks[some]]
                done(it.connector.write_layer(layer, segments[some], views, **target.where))
                for segment in segments[some]:
                    place = it.part(expected, segment)[:, layer : layer + 1]
                    place.copy_(it.part(kv, segment)[:, layer : layer + 1])
                assert same(target.kv(), expected), f"after layer {layer}"
        assert target.surroundings() == around
        assert all(same(torch.as_tensor(c.tensor), it.part(kv, s)) for c, s in zip(chunks, segments, strict=True))
