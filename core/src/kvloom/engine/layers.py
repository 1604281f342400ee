"""The verbs that move KV layer by layer, while the model runs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from kvloom.contracts.connector import GPUConnector
from kvloom.engine.assembly import Components
from kvloom.engine.lookup import Index
from kvloom.errors import BackendError
from kvloom.pipeline.layer_load import Loading
from kvloom.pipeline.layer_store import Storing
from kvloom.pipeline.load import Pieces
from kvloom.pipeline.transfer import check_connector, check_where
from kvloom.telemetry.events import Callers
from kvloom.telemetry.request_trace import RequestTrace
from kvloom.tiers.chain import Chain
from kvloom.types import ChunkKey, Segment


class LayerVerbs(Index):
    """The verbs of an engine that move single layers."""

    def __init__(self, parts: Components) -> None:
        super().__init__(parts)
        self._by_layer: weakref.WeakSet[Loading | Storing] = weakref.WeakSet()
        """The loads and stores that are not over yet."""

    def after_fork_in_child(self, pid: int) -> None:
        super().after_fork_in_child(pid)
        for handle in tuple(self._by_layer):
            handle.after_fork_in_child(BackendError(self._gone))

    def retrieve_layer(
        self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str | None = None, **where: Any
    ) -> Loading:
        """`retrieve`, layer by layer: returns once the tiers have been looked up, and continues in the background.

        `Loading.wait(layer)` gives the mask of that layer. Close it, or use it as a context manager. Raises
        NotImplementedError if the connector does not move single layers.
        """
        callers = self._callers()

        def begun() -> Loading:
            whole, first = self._selected(tokens, mask, salt)
            record = self._record("retrieve_layer", whole, first, tokens, callers=callers)
            chain = [segment.key for segment in whole]
            pieces = self._pieces(tokens, salt)
            return self._loading(whole[first:], tokens.numel(), where, chain=chain, record=record, pieces=pieces)

        return self._runtime.uninterrupted(begun, discard=Loading.close)

    def store_layer(
        self, tokens: torch.Tensor, mask: torch.Tensor | None = None, *, salt: str | None = None, **where: Any
    ) -> Storing:
        """`store`, layer by layer, while the KV is being computed: it need not be there yet.

        Call `Storing.layer(layer)` for each layer, then `Storing.finish()`. Close it, or use it as a context manager:
        until then it holds memory, and without `finish` nothing is stored. Raises NotImplementedError if the connector
        does not move single layers.
        """
        begun = partial(self._storing, self._callers(), tokens, mask, salt, where)
        return self._runtime.uninterrupted(begun, discard=Storing.close)

    def _storing(
        self,
        callers: Callers,
        tokens: torch.Tensor,
        mask: torch.Tensor | None,
        salt: str | None,
        where: Mapping[str, Any],
    ) -> Storing:
        check_connector(self.connector, "read_layer")
        whole, first = self._selected(tokens, mask, salt, inside=True)
        keys = [segment.key for segment in whole]

        def finished() -> None:
            self._stack.touch(keys)
            self._tokens.learn(tokens, salt=self._salt(salt))

        storing = Storing(
            whole[first:], tokens.numel(), where, chain=Chain(keys), stack=self._stack, connector=self.connector,
            events=self._events, runtime=self._runtime, finished=finished, on_end=self._by_layer.discard,
            record=self._record("store_layer", whole, first, tokens, callers=callers),
        )  # fmt: skip
        self._by_layer.add(storing)
        return storing

    def load_layers(self, segments: Sequence[Segment], *, into: GPUConnector | None = None, **where: Any) -> Loading:
        """`load`, layer by layer. It ends at the first segment that no tier delivers.

        Masks are over the tokens up to the last segment's end. Otherwise as `retrieve_layer`.
        """
        callers = self._callers()

        def begun() -> Loading:
            num_tokens = max((segment.end for segment in segments), default=0)
            chain = [segment.key for segment in segments]
            record = self._record("load_layers", segments, callers=callers)
            connector = into or self.connector
            return self._loading(segments, num_tokens, where, chain=chain, connector=connector, record=record)

        return self._runtime.uninterrupted(begun, discard=Loading.close)

    def _loading(
        self, segments: Sequence[Segment], num_tokens: int, where: Mapping[str, Any], *, chain: Sequence[ChunkKey],
        record: RequestTrace, connector: GPUConnector | None = None, pieces: Pieces | None = None,
    ) -> Loading:  # fmt: skip
        connector = connector or self.connector
        check_connector(connector, "write_layer")
        self._check_open()
        check_where(connector, segments, where)
        self._stack.touch(chain)
        loading = Loading(
            segments, num_tokens, connector.ordered(where), chain=chain, stack=self._stack, connector=connector,
            events=self._events, runtime=self._runtime, on_end=self._by_layer.discard, record=record, pieces=pieces,
        )  # fmt: skip
        self._by_layer.add(loading)
        loading.begin()
        return loading
