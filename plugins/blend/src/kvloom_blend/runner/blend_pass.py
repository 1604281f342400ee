"""One forward pass of a transformers model over a batch with some retrieved KV.

The model's own code runs, with hooks: a cache whose `update` merges computed into retrieved KV, and a hook before each
decoder layer that drops the rows which go no further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from itertools import pairwise
from typing import Any

import torch
from transformers import DynamicCache

from kvloom import BlendSession

from .attention import Rows

Retrieved = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""layer -> K, turned to where the tokens stand now, and V, each `[tokens, hidden]`."""
Plane = tuple[torch.Tensor, torch.Tensor]


class BlendPass:
    """The state of one pass; all of it lives here."""

    def __init__(
        self, layers: Sequence[torch.nn.Module], session: BlendSession, retrieved: Retrieved, *, valid: torch.Tensor,
        starts: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, heads: tuple[int, int],
        device: torch.device, watch: bool = False,
    ) -> None:  # fmt: skip
        """valid: bool, on CPU. starts: `query_start_loc`. positions: of each token in its request.
        wanted: places in the batch, ascending, whose logits are asked for; all of them go on in every layer.
        heads: of K and V, and their size. watch: count attention."""
        self._layers = {id(layer): number for number, layer in enumerate(layers)}
        self._last = len(layers) - 1
        self._session = session
        self._retrieved = retrieved
        self._valid = valid
        self._starts = starts
        self._positions = positions.to(device)
        self._wanted = wanted
        self._heads = heads
        self._device = device
        plan = session.plan()
        everyone = torch.arange(len(valid))
        self.going = everyone if plan is None else everyone[plan.cpu()]
        """Places in the batch of the rows that are computed now."""
        self.first = self.going
        self.planes: list[Plane | None] = [None] * len(layers)
        """K and V of each layer, `[tokens, hidden]`, once it is computed."""
        self.computed = 0
        """Rows times layers."""
        self.attention = torch.zeros(len(valid), device=device) if watch else None
        """The attention of the rows to each token, times the length of its V, summed over layers, heads and rows; None
        unless watched."""
        self._rows = self._rows_of(self.going)
        self._pending: torch.Tensor | None = None
        """The rows that go on from the next layer, if they were selected in the middle of this one."""
        self._projecting = False

    # -- what the model calls ------------------------------------------------------------------------------------------

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> Plane:
        """The cache's `update`: K and V of the rows, `[1, kv_heads, rows, size]`, to those of all tokens."""
        if self._projecting:
            raise _Projected(key, value)
        if self.planes[layer] is None:
            local = self._blend(layer, key, value)
            if local is not None:
                self._pending = local
        k, v = self.planes[layer]  # type: ignore[misc]
        return self._split(k), self._split(v)

    def before_layer(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The hook before a decoder layer. A call of the model in another thread is none of its business."""
        if getattr(kwargs.get("past_key_values"), "blend_pass", None) is not self:
            return args, kwargs
        layer = self._layers[id(module)]
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states")
        if self._pending is not None:
            hidden = self._leave_out(hidden, self._pending)
            self._pending = None
        if layer == self._last or self._session.selects_in(layer):
            local = self._select_early(module, layer, hidden, (args[1:], kwargs))
            # Whoever watches the attention wants that of all rows.
            if layer == self._last and self.attention is None:
                local = self._only_wanted(local)
            if local is not None:
                hidden = self._leave_out(hidden, local)
        self.computed += hidden.shape[1]
        return (hidden, *args[1:]), self._arguments(kwargs)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _select_early(self, module: Any, layer: int, hidden: torch.Tensor, more: Any) -> torch.Tensor | None:
        """Compute only K and V of the layer, and select the rows that go on: the other rows skip the
        rest of the layer."""
        rest, kwargs = more
        self._projecting = True
        try:
            with _narrow_queries(module) as narrowed:
                narrowed.run(module.forward, hidden, *rest, **self._arguments(kwargs))
        except _Projected as projected:
            return self._blend(layer, projected.key, projected.value)
        finally:
            self._projecting = False
        raise ValueError(f"{type(module).__name__} has no KV: its cache was not updated")

    def _blend(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
        """Pass a layer to the session; return the rows that go on, by their place among the present ones, if not all
        do."""
        k, v = self._retrieved(layer)
        going = self.going.to(self._device)
        output = self._session.blend(
            layer, k, v, self._valid, self._positions, key.new_empty(len(going), 0), _flat(key), _flat(value),
            self._positions[going], self._starts, 0,
        )  # fmt: skip
        self.planes[layer] = output.k, output.v
        return output.local_indices.cpu() if len(output.local_indices) < len(going) else None

    def _only_wanted(self, local: torch.Tensor | None) -> torch.Tensor:
        """In the last layer, keep only K and V of the rows whose logits are not wanted."""
        going = self.going if local is None else self.going[local]
        places = torch.searchsorted(going, self._wanted)
        return places if local is None else local[places]

    def _leave_out(self, hidden: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        self.going = self.going[local]
        self._rows = self._rows_of(self.going)
        return hidden[:, local.to(hidden.device)]

    def _rows_of(self, going: torch.Tensor) -> Rows:
        return Rows(going, self._starts.tolist(), self._device, attention=self.attention)

    def _arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The layer's arguments, for the rows that are left."""
        kwargs = dict(kwargs)
        kwargs["attention_mask"] = self._rows
        if len(self.going) < len(self.first):
            index = torch.searchsorted(self.first, self.going).to(self._device)
            for name in ("position_embeddings", "position_ids", "cache_position"):
                kwargs[name] = _rows_at(kwargs.get(name), index)
        return kwargs

    def _split(self, plane: torch.Tensor) -> torch.Tensor:
        return plane.unflatten(1, self._heads).transpose(0, 1)[None]


class BlendCache(DynamicCache):
    """The cache that the model is given for one pass."""

    def __init__(self, blend_pass: BlendPass) -> None:
        super().__init__()
        self.blend_pass = blend_pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Plane:
        return self.blend_pass.update(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def split_caches(planes: Sequence[Plane], starts: Sequence[int], heads: tuple[int, int], config: Any) -> list[Any]:
    """A DynamicCache for each request: views of the pass's K and V."""
    caches = []
    for begin, end in pairwise(starts):
        cache = DynamicCache(config=config)
        for layer, plane in zip(cache.layers, planes, strict=True):
            k, v = (one[begin:end].unflatten(1, heads).transpose(0, 1)[None] for one in plane)
            layer.lazy_initialization(k, v)
            layer.keys, layer.values = k, v
        caches.append(cache)
    return caches


class _Projected(Exception):
    """K and V are there, and nothing else of the layer is wanted."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        super().__init__()
        self.key, self.value = key, value


_narrowing: ContextVar[object] = ContextVar("narrowing", default=None)
"""The pass whose hooks are active: an interrupt may leave hooks of others, and other threads may call the model."""


@contextmanager
def _narrow_queries(layer: torch.nn.Module) -> Iterator[Context]:
    """Compute Q for one row only in this context, where Q has a projection of its own: its result is not used."""
    projections = [module for name, module in layer.named_modules() if name.rsplit(".", 1)[-1] == "q_proj"]
    hooks, mine, context = [], object(), copy_context()
    context.run(_narrowing.set, mine)
    for module in projections:
        rows: list[int] = []

        def narrow(_: Any, args: tuple[Any, ...], rows: list[int] = rows) -> tuple[Any, ...]:
            if _narrowing.get() is not mine:
                return args
            rows[:] = [args[0].shape[1]]
            return (args[0][:, :1], *args[1:])

        def widen(_: Any, args: Any, output: torch.Tensor, rows: list[int] = rows) -> torch.Tensor:
            return output.expand(-1, rows[0], -1) if _narrowing.get() is mine else output

        hooks += [module.register_forward_pre_hook(narrow), module.register_forward_hook(widen)]
    try:
        yield context
    finally:
        for hook in hooks:
            hook.remove()


def _flat(states: torch.Tensor) -> torch.Tensor:
    """`[1, heads, rows, size]` to `[rows, heads * size]`."""
    return states[0].transpose(0, 1).flatten(1)


def _rows_at(value: Any, index: torch.Tensor) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_rows_at(one, index) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    return value[index] if value.dim() == 1 else value[:, index]
