"""The layers of a load that is under way, each of which may be computed with as soon as it is there."""

from __future__ import annotations

from threading import Condition

from kvloom.device import Device, StreamEvent


class LayerEvents:
    """The events of one load, one for each layer, after which the layer is in the engine's pages.

    It belongs to one call of `VLLMConnector.write`, which queues the layers in order. If chunks come in several calls,
    as from a store, no layer is there before the load has ended.
    """

    def __init__(self, layers: int, chunks: int) -> None:
        self.layers, self.chunks = layers, chunks
        self._changed = Condition()
        self._queued: list[tuple[Device, StreamEvent] | None] = []
        self._ended = False
        self._waited: set[int] = set()

    def there(self, device: Device | None = None, event: StreamEvent | None = None) -> None:
        """The next layer is in the pages, or will be after an event of a device."""
        with self._changed:
            self._queued.append(None if device is None or event is None else (device, event))
            self._changed.notify_all()

    def end(self) -> None:
        """The load is over, whether all came or not: nobody waits any longer."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Have what the thread queues on its current stream from now on come after this layer.

        Blocks until the layer is queued; in host memory, until it is there.
        """
        self._waited.add(layer)
        if len(self._queued) <= layer:
            with self._changed:
                while len(self._queued) <= layer and not self._ended:
                    self._changed.wait()
        after = self._queued[layer] if layer < len(self._queued) else None
        if after is not None:
            device, event = after
            device.current().wait_event(event)

    @property
    def skipped(self) -> int | None:
        """The first layer that nobody has waited for."""
        return next((layer for layer in range(self.layers) if layer not in self._waited), None)
