"""Clients that load and store layer by layer, and do with their KV what an engine would do meanwhile."""

from __future__ import annotations

import random
from typing import Any

import torch

from kvloom import BackendError, Engine
from kvloom.pipeline.layer_load import Loading
from kvloom.pipeline.layer_store import Storing
from simulation.content import CHUNK_TOKENS, LAYERS, Prompt
from simulation.fibers import Scheduler
from simulation.oracle import Oracle

_GARBAGE = 0x3C3C


class LayerVerbs:
    """The layer-wise calls of a `Client`."""

    site: Any
    engine: Engine
    model: int
    salt: str
    prompt: Prompt
    about: str
    space: str
    _scheduler: Scheduler
    _oracle: Oracle
    _rng: random.Random
    _mask: Any
    _op: Any
    _segments: Any
    _keys: Any
    _served: Any
    _leave: Any

    def _retrieve_layers(self) -> None:
        mask, skipped = self._mask()
        kv = self.prompt.blank()
        gone = self._oracle.gone_now(self._keys())
        with self._op("retrieve_layer") as op:
            loading = self.engine.retrieve_layer(self.prompt.tokens, mask, salt=self.salt, kv=kv.view(torch.bfloat16))
        self._oracle.tell(op, f"{loading.hit.tokens} believed")
        try:
            counts = self._take_layers(loading, kv, skipped)
        except BackendError:
            loading.close()
            raise
        with self._op("layer.close") as close:
            loading.close()
        served = self._served(skipped, skipped + counts[0])
        self._oracle.check_not_gone(gone, served)
        self._oracle.check_age(served, op.began, self.site.ttl)
        if len(counts) == LAYERS:
            self._oracle.served_chunks += -(-counts[-1] // CHUNK_TOKENS)
        self._leave(kv, f"retrieve_layer {self.about}")
        self._oracle.tell(close, f"{counts} of {self.prompt.length - skipped}")

    def _take_layers(self, loading: Loading, kv: torch.Tensor, skipped: int) -> list[int]:
        """Number of tokens that each layer delivered. Tokens that a mask lacks are computed at once,
        into the same KV."""
        counts = [self.prompt.length - skipped]
        mine = torch.zeros(self.prompt.length, dtype=torch.bool)
        for layer in range(LAYERS):
            self._think()
            with self._op("layer.wait") as op:
                got = loading.wait(layer)
            count = int(got.count_nonzero())
            run = torch.zeros_like(got)
            run[skipped : skipped + count] = True
            if count > counts[-1] or not torch.equal(got, run):
                self._oracle.violated("wrong mask", f"{self.about}, layer {layer}: {got.tolist()} after {counts}")
            self._check_layers(kv, range(skipped, skipped + count), layer)
            mine |= ~got
            mine[:skipped] = False
            kv[:, :, mine] = _GARBAGE
            counts.append(count)
            self._oracle.tell(op, f"layer {layer}: {count}")
            if self._rng.random() < 0.1:
                break
        self._think()
        if bool((kv[:, :, mine] != _GARBAGE).any()):
            self._oracle.violated("touched later", f"{self.about}: KV that a mask had left to the caller was written")
        if not torch.equal(kv[:, :, :skipped], self.prompt.blank()[:, :, :skipped]):
            self._oracle.violated("wrong bytes", f"{self.about}: KV before the selected tokens was touched")
        return counts[1:]

    def _check_layers(self, kv: torch.Tensor, tokens: range, layer: int) -> None:
        """Every layer up to this one is there, and of one fidelity."""
        exact, other = (self.prompt.kv(self.model, self.salt, lossy=lossy) for lossy in (False, True))
        for index in tokens:
            got = kv[:, : layer + 1, index]
            if torch.equal(got, exact[:, : layer + 1, index]):
                continue
            if not (self.site.lossy and torch.equal(got, other[:, : layer + 1, index])):
                self._oracle.violated("wrong bytes", f"{self.about}: token {index}, layers up to {layer}")

    def _store_layers(self) -> None:
        mask, _ = self._mask()
        real = self.prompt.kv(self.model, self.salt)
        kv = torch.full_like(real, _GARBAGE)
        keys = [str(segment.key) for segment in self._segments()]
        with self._oracle.storing(keys, self.space):
            with self._op("store_layer") as op:
                storing = self.engine.store_layer(self.prompt.tokens, mask, salt=self.salt, kv=kv.view(torch.bfloat16))
            self._oracle.tell(op, f"{int(storing.mask.count_nonzero())} to copy")
            try:
                done = self._give_layers(storing, real, kv)
            except BackendError:
                storing.close()
                raise
            with self._op("layer.finish" if done else "layer.close") as op:
                (storing.finish if done else storing.close)()
            self._oracle.tell(op, "")

    def _give_layers(self, storing: Storing, real: torch.Tensor, kv: torch.Tensor) -> bool:
        """Give the layers; return whether all were given. Some forward passes are cancelled."""
        layers = list(range(LAYERS))
        self._rng.shuffle(layers)
        for layer in layers:
            self._think()
            kv[:, layer] = real[:, layer]
            with self._op("layer.store") as op:
                storing.layer(layer)
            kv[:, layer] = _GARBAGE  # it is the caller's again
            self._oracle.tell(op, str(layer))
            if self._rng.random() < 0.07:
                return False
        return True

    def _think(self) -> None:
        """Take the time of computing a layer: none, or longer than a deadline now and then."""
        roll = self._rng.random()
        if roll < 0.4:
            seconds = self._rng.expovariate(1000) if roll > 0.02 else 2 * self.site.allowance.deadline
            self._scheduler.park(self._scheduler.time + seconds, "a layer")
