"""The three lines: `model = cached(model, "laptop.yaml")`, and `model.generate` never prefills a prompt twice."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig

from kvloom import ConfigError, Engine, EngineConfig, Hit, KVSpec, check_config

from .calls import check_call
from .identity import describe, signature, transformers_model
from .plain import PlainKV
from .restored import RestoredKV, empty_cache

log = logging.getLogger("kvloom.connector_transformers")

_STATES = 8
"""Number of states of one model (sets of adapters, autocast) that keep an engine ready."""


@dataclass(frozen=True, slots=True)
class Report:
    """The report of one `generate`."""

    rows: int
    prompt_tokens: int
    """Length of each row."""
    hit_tokens: int
    """Number of tokens of each row that were not prefilled."""
    by_tier: Mapping[str, int]
    """Forecast number of tokens from each tier, for the row with the shortest hit."""
    lookup_seconds: float
    load_seconds: float
    """Reading from the tiers, verifying and writing into the cache."""
    compute_seconds: float
    """The rest of the prompt and all generated tokens."""
    store_seconds: float
    note: str = ""
    """The reason why nothing was looked up or stored, unless that was asked for."""


@dataclass(slots=True)
class _Start:
    """The cache to start from."""

    cache: DynamicCache
    tokens: int = 0
    by_tier: Mapping[str, int] = field(default_factory=dict)
    lossy: frozenset[str] = frozenset()
    lookup_seconds: float = 0.0
    load_seconds: float = 0.0


@dataclass(slots=True)
class _State:
    """The model in one state: its KV, and the engine for it, or why there is none."""

    spec: KVSpec
    kv: PlainKV
    engine: Engine | None = None
    note: str = ""


def cached(model: Any, config: str | Path | Mapping[str, Any] | EngineConfig) -> CachedModel:
    """Wrap a transformers or PEFT model, so that `generate` takes KV from the tiers of `config` and keeps it there.

    Opening reads every weight once, for the model's fingerprint. ValueError, with the layers' numbers, if the model's
    KV can't be restored exactly; ConfigError if the configuration can't work.
    """
    config = EngineConfig.load(config)
    if config.connector.type != "transformers":
        raise ConfigError(
            "connector", f"is {config.connector.type!r}; a transformers model needs `connector: transformers`"
        )
    check_config(config)  # before every weight is read
    return CachedModel(model, config)


class CachedModel:
    """A model whose `generate` starts from stored KV. Attributes that it lacks are the model's.

    Close it, or use it as a context manager: closing writes accepted KV. One call at a time.
    """

    def __init__(self, model: Any, config: EngineConfig) -> None:
        """Use `cached`."""
        self.model = model
        self.last: Report | None = None
        """The report of the latest `generate`."""
        spec, kv = describe(model)
        self.engine = Engine.open(config, spec)
        self._by_spec = {spec.to_json(): self.engine}
        self._states = {signature(model): _State(spec, kv, self.engine)}

    def generate(
        self, inputs: torch.Tensor | None = None, generation_config: GenerationConfig | None = None, *,
        salt: str | None = None, store: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """`model.generate` with the same arguments and result, the known part of the prompt taken from the tiers.

        inputs (or input_ids): `[rows, tokens]`, rows of equal length; the hit is that of the row with the fewest.
        salt: keeps tenants apart; default is the config's. store: whether to keep the KV of this call.
        ValueError, naming the argument, for a call that stored KV can't serve. Tiers that fail are misses.
        """
        ids = check_call(self.model, inputs, generation_config, kwargs)
        state = self._state()
        rows = ids.cpu()
        start = self._start(state, rows, salt)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("input_ids", "attention_mask")}
        began = time.perf_counter()
        output = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=generation_config,
            past_key_values=start.cache, use_cache=True, **kwargs,
        )  # fmt: skip
        sequences = (output if isinstance(output, torch.Tensor) else output.sequences).cpu()
        computed = time.perf_counter()
        note = self._keep(state, start, sequences, rows.shape[1], salt) if store else state.note
        self.last = Report(
            rows=rows.shape[0], prompt_tokens=rows.shape[1], hit_tokens=start.tokens, by_tier=start.by_tier,
            lookup_seconds=start.lookup_seconds, load_seconds=start.load_seconds, compute_seconds=computed - began,
            store_seconds=time.perf_counter() - computed, note=note,
        )  # fmt: skip
        return output

    def close(self) -> None:
        """Write accepted KV and release everything but the model. Idempotent."""
        for engine in reversed(self._by_spec.values()):
            engine.close()

    def __enter__(self) -> CachedModel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _state(self) -> _State:
        """The model as it is now: adapters, weights and autocast may have changed since the last call."""
        now = signature(self.model)
        if now not in self._states:
            self._states[now] = _State(*describe(self.model))
            if len(self._states) > _STATES:
                self._forget(next(iter(self._states)))
        state = self._states[now]
        if state.engine is None:
            self._attach(state)
        return state

    def _attach(self, state: _State) -> None:
        """Give the state its engine. Tried again with each call: a tier that failed may be back."""
        text = state.spec.to_json()
        try:
            if text not in self._by_spec:
                self._by_spec[text] = self.engine.sibling(state.spec)
            state.engine, state.note = self._by_spec[text], ""
        except Exception as error:
            note = f"served without the cache: {error}"
            if _shape(state.spec) != _shape(self.engine.spec):
                note = "the model's KV has another shape or dtype now than when the tiers were opened"
            if note != state.note:
                log.warning("%s", note, exc_info=True)
            state.note = note

    def _forget(self, signature: Any) -> None:
        engine = self._states.pop(signature).engine
        if (
            engine is not None
            and engine is not self.engine
            and all(s.engine is not engine for s in self._states.values())
        ):
            self._by_spec = {text: other for text, other in self._by_spec.items() if other is not engine}
            try:
                engine.close()
            except Exception:
                log.warning("the engine of an earlier state of the model did not close", exc_info=True)

    def _start(self, state: _State, rows: torch.Tensor, salt: str | None) -> _Start:
        """Load the stored KV of every row, at most all but its last token, which gives the logits."""
        config = transformers_model(self.model).config
        if state.engine is None:
            return _Start(empty_cache(config))
        try:
            return _load(state, state.engine, rows, salt, config)
        except Exception:
            log.warning("nothing loaded: the prompt is prefilled", exc_info=True)
            return _Start(empty_cache(config))

    def _keep(self, state: _State, start: _Start, sequences: torch.Tensor, prompt_tokens: int, salt: str | None) -> str:
        """Store computed KV. Returns the reason if it is not stored."""
        engine = state.engine
        if engine is None:
            return state.note
        if start.lossy:
            return f"computed on top of KV that went through {', '.join(sorted(start.lossy))}: it is not exact"
        num_tokens = int(start.cache.get_seq_length()) if engine.config.save_decode_cache else prompt_tokens
        try:
            for row, tokens in enumerate(sequences[:, :num_tokens]):
                engine.store(tokens, salt=salt, cache=start.cache, row=row)
        except Exception as error:
            log.warning("nothing stored", exc_info=True)
            return f"storing failed: {error}"
        return ""


def _shape(spec: KVSpec) -> tuple[Any, ...]:
    return spec.dtype, spec.blob_shape(1)


def _load(state: _State, engine: Engine, rows: torch.Tensor, salt: str | None, config: Any) -> _Start:
    began = time.perf_counter()
    hit = min((engine.lookup(tokens, salt=salt) for tokens in rows), key=lambda hit: hit.tokens, default=Hit(0))
    found = time.perf_counter()
    if not hit:
        return _Start(empty_cache(config), lookup_seconds=found - began)
    restored = RestoredKV.allocate(
        engine.spec, hit.tokens, rows=rows.shape[0], devices=state.kv.devices, key_size=state.kv.key_size
    )
    num_tokens = useful = min(hit.tokens, rows.shape[1] - 1)
    for row, tokens in enumerate(rows[:, : hit.tokens]):
        mask = engine.retrieve(tokens, salt=salt, cache=restored, row=row)
        num_tokens = min(num_tokens, int(mask.count_nonzero()))
    by_tier = dict(hit.by_tier)
    by_tier[next(reversed(by_tier))] -= hit.tokens - useful
    return _Start(
        restored.install(config, num_tokens), num_tokens, by_tier, frozenset(restored.lossy if num_tokens else ()),
        lookup_seconds=found - began, load_seconds=time.perf_counter() - found,
    )  # fmt: skip
