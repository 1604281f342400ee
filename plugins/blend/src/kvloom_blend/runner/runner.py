"""A transformers model, run over what a retriever found and an executor chose."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache

from kvloom import BlendExecutor, BlendRequest, BlendRetrieverTask, Config, KVSpec
from kvloom_connector_transformers import transformers_model

from ..executors import NoneExecutor
from ..retrievers.load_task import LoadTask
from ..rotation import Rotations, Turn
from ..rotation.gate import check
from ..rotation.models import probed
from .attention import set_for, settle
from .blend_pass import BlendCache, BlendPass, Plane, split_caches
from .given import GivenTask, kv_of


@dataclass(frozen=True)
class Prefilled:
    """The KV of a batch of prompts, and logits."""

    logits: list[torch.Tensor]
    """Logits of each prompt's last tokens: `[keep_logits, vocabulary]`."""
    caches: list[Any]
    """A DynamicCache for each prompt, with all of it."""
    prompt_tokens: int
    exact_tokens: int
    """Retrieved, and equal to what would have been computed."""
    blended_tokens: int
    """Retrieved from another context: approximate, whether or not they were computed again."""
    computed_share: float
    """Rows computed, in all layers, as a share of those of a whole prefill; a look at the question's attention counts
    too."""
    note: str = ""
    """The reason why nothing was blended, unless that was asked for."""

    @property
    def exact(self) -> bool:
        """Return whether the KV is exactly that of a prefill."""
        return self.blended_tokens == 0


_TRIED = 12
"""Tokens of the pass that a model is tried with."""
_ROUNDING = 0.05
"""Maximum error of logits, relative to the largest. Wrong masks and places are an order off."""
_locks: WeakKeyDictionary[torch.nn.Module, threading.Lock] = WeakKeyDictionary()


def _lock_of(model: torch.nn.Module) -> threading.Lock:
    """The lock of a model: its hooks and attention function are shared by all who run it."""
    return _locks.setdefault(model, threading.Lock())


class Runner:
    """Runs a model without changing its code: by a cache of its own, hooks and an attention function, for one pass.

    Every decoder of transformers whose layers take their rows, their mask and their cache as Llama's do can be run;
    so do those of Mistral, Qwen, Gemma and Phi. ValueError for a model whose K cannot be moved.
    """

    def __init__(self, model: Any, spec: KVSpec) -> None:
        self.model = transformers_model(model)
        if any(DynamicCache(config=self.model.config).is_sliding):
            raise ValueError(f"model: {type(self.model).__name__} has layers with a window, which are not blended")
        if spec.kv_planes != 2:
            raise ValueError(
                f"model: {type(self.model).__name__} has K and V of different sizes, which are not blended"
            )
        self.spec = spec
        self.rotations, seen = probed(model)
        check(seen, self.rotations)
        self.heads = (spec.num_kv_heads, spec.head_size)
        self.device = next(self.model.parameters()).device
        self._layers = _decoder_layers(self.model, spec.num_layers)
        self._one_at_a_time = _lock_of(self.model)
        self._try()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """No pass of the model is under way in it, and its attention is its own."""
        with self._one_at_a_time:
            settle(self.model.config.get_text_config(decoder=True))
            yield

    def prefill(self, rows: Sequence[torch.Tensor], *, keep_logits: int = 1, note: str = "") -> Prefilled:
        """Prefill with the model alone. rows: 1-D token ids of each prompt."""
        with self._one_at_a_time, torch.inference_mode():
            caches, logits = [], []
            for row in rows:
                cache = DynamicCache(config=self.model.config)
                output = self.model(
                    input_ids=row[None].to(self.device), past_key_values=cache, use_cache=True,
                    logits_to_keep=keep_logits,
                )  # fmt: skip
                caches.append(cache)
                logits.append(output.logits[0])
        return Prefilled(logits, caches, sum(map(len, rows)), 0, 0, 1.0, note)

    def blend(
        self, rows: Sequence[torch.Tensor], task: BlendRetrieverTask, executor: BlendExecutor, *, keep_logits: int = 1,
        min_tokens: int = 0,
    ) -> Prefilled:  # fmt: skip
        """One pass over all prompts. Raises BackendError if KV that was said to be valid is lost on the way.

        min_tokens: of shorter prompts everything is computed.
        """
        batch = _Batch.of(rows, task, keep_logits, min_tokens)
        if not bool(batch.valid.any()):
            return self.prefill(rows, keep_logits=keep_logits, note="nothing was found")
        with self._one_at_a_time, torch.inference_mode():
            turns = self.rotations.turns(batch.stood.to(self.device), batch.positions.to(self.device))
            turned = _Turned(task, turns, self.rotations, self.device)

            asked = 0

            def attention() -> torch.Tensor:
                nonlocal asked
                probe = self._run(batch, self._request(batch), NoneExecutor(Config()), turned.copied, watch=True)[0]
                assert probe.attention is not None
                asked += probe.computed
                return probe.attention.cpu()

            request = self._request(batch, attention=attention, in_place=turned.in_place)
            done, logits = self._run(batch, request, executor, turned)
        planes: list[Plane] = [plane for plane in done.planes if plane is not None]
        exact = int((batch.valid & batch.exact).sum())
        return Prefilled(
            list(logits.split([keep_logits] * len(rows))),
            split_caches(planes, batch.edges, self.heads, self.model.config),
            batch.edges[-1], exact, int(batch.valid.sum()) - exact,
            (done.computed + asked) / (batch.edges[-1] * len(planes)),
        )  # fmt: skip

    # -- inside --------------------------------------------------------------------------------------------------------

    def _try(self) -> None:
        """Blend a few tokens over their own KV. ValueError unless that comes to what the model computes."""
        prompt = torch.arange(_TRIED) % self.model.config.get_text_config(decoder=True).vocab_size
        whole = self.prefill([prompt])
        valid = torch.arange(_TRIED) < _TRIED // 2
        name = type(self.model).__name__
        try:
            task = GivenTask(kv_of(whole.caches[0]), valid, torch.where(valid, torch.arange(_TRIED), 0))
            done = self.blend([prompt], task, NoneExecutor(Config()))
        except Exception as error:
            raise ValueError(f"model: {name} cannot run on a subset of tokens: {error}") from error
        here, there = done.logits[0].float(), whole.logits[0].float()
        apart = float((here - there).abs().max())
        if not self.model.training and not apart <= _ROUNDING * float(there.abs().max()):
            raise ValueError(f"model: {name} gives other results for a subset of tokens: logits differ by {apart:.2g}")

    def _request(self, batch: _Batch, **more: Any) -> BlendRequest:
        return BlendRequest(
            batch.tokens, batch.starts, batch.valid, original_positions=batch.stood, exact_mask=batch.exact, **more
        )

    def _run(
        self, batch: _Batch, request: BlendRequest, executor: BlendExecutor, retrieved: Any, *, watch: bool = False
    ) -> tuple[BlendPass, torch.Tensor]:
        # The session may want to know what the question attends to: a pass of its own, before this one.
        with _blamed(executor):
            session = executor.begin(request)
        done = BlendPass(
            self._layers, session, retrieved, valid=batch.valid, starts=batch.starts, positions=batch.positions,
            wanted=batch.wanted, heads=self.heads, device=self.device, watch=watch,
        )  # fmt: skip
        ids = batch.tokens.to(self.device)[done.first.to(self.device)]
        positions = batch.positions.to(self.device)[done.first.to(self.device)]
        with self._hooked(done), _blamed(executor):
            # A mask of four dimensions is handed on as it is: the model does not make one.
            output = self.model(
                input_ids=ids[None], position_ids=positions[None], past_key_values=BlendCache(done), use_cache=True,
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device), logits_to_keep=0,
            )  # fmt: skip
        return done, output.logits[0]

    @contextmanager
    def _hooked(self, done: BlendPass) -> Iterator[None]:
        hooks: list[RemovableHandle] = []
        # An interrupt may leave a hook behind, which then holds nothing of this pass.
        called = partial(_before_layer, WeakMethod(done.before_layer))
        try:
            hooks.extend(layer.register_forward_pre_hook(called, with_kwargs=True) for layer in self._layers)
            with set_for(self.model.config.get_text_config(decoder=True)):
                yield
        finally:
            for hook in hooks:
                hook.remove()


def _before_layer(
    method: WeakMethod[Callable[..., Any]], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    before = method()
    return (args, kwargs) if before is None else before(module, args, kwargs)


@contextmanager
def _blamed(executor: BlendExecutor) -> Iterator[None]:
    """Add the executor's name and module to errors raised within: an executor may come from any package."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while blending with executor {executor.type!r} ({type(executor).__module__})")
        raise


@dataclass(frozen=True)
class _Batch:
    """Prompts one behind the other, with the KV found for them; all on CPU."""

    tokens: torch.Tensor
    starts: torch.Tensor
    positions: torch.Tensor
    """The position of each token in its prompt."""
    valid: torch.Tensor
    """The tokens whose KV was retrieved, except those whose logits are wanted, which are computed."""
    exact: torch.Tensor
    stood: torch.Tensor
    """The position of each token when its KV was computed; its present position, if it was not retrieved."""
    wanted: torch.Tensor
    """Places whose logits are asked for."""

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor], task: BlendRetrieverTask, keep_logits: int, min_tokens: int) -> _Batch:
        edges = [0, *accumulate(len(row) for row in rows)]
        positions = torch.cat([torch.arange(len(row)) for row in rows])
        found = task.result(0)
        wanted = torch.cat([torch.arange(end - keep_logits, end) for end in edges[1:]])
        valid = found.valid_mask.clone()
        valid[wanted] = False
        for begin, end in pairwise(edges):
            if end - begin < min_tokens:
                valid[begin:end] = False
        exact = task.exact_mask if isinstance(task, LoadTask) else torch.zeros_like(valid)
        stood = torch.where(valid, found.original_positions.cpu().long(), positions)
        return cls(torch.cat(list(rows)).cpu(), torch.tensor(edges), positions, valid, exact & valid, stood, wanted)

    @property
    def edges(self) -> list[int]:
        return list(self.starts.tolist())


class _Turned:
    """The retrieved KV, with K rotated to the present positions; each layer once."""

    def __init__(
        self, task: BlendRetrieverTask, turns: Sequence[Turn | None], rotations: Rotations, device: torch.device
    ) -> None:
        self._task = task
        self._turns = turns
        self._rotations = rotations
        self._device = device
        self.in_place = isinstance(task, LoadTask)
        self._done: dict[int, Plane] = {}

    def __call__(self, layer: int) -> Plane:
        if layer not in self._done:
            result = self._task.result(layer)
            assert result.k is not None and result.v is not None
            k, v = result.k.to(self._device), result.v.to(self._device)
            rotation, turn = self._rotations[layer], self._turns[layer]
            if rotation is not None and turn is not None:
                k = rotation.apply(k, turn, out=k if self.in_place else None)
            self._done[layer] = k, v
        return self._done[layer]

    def copied(self, layer: int) -> Plane:
        """For a pass that is not the last."""
        k, v = self(layer)
        return k.clone(), v.clone()


def _decoder_layers(model: Any, count: int) -> list[torch.nn.Module]:
    """The decoder's layers, in order. ValueError if they are not where transformers has them."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or len(layers) < count:
        raise ValueError(f"model: {type(model).__name__} has no list of decoder layers")
    return list(layers)[:count]
