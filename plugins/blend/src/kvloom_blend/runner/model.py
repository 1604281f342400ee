"""`blended(model, config)`: a transformers model that takes KV of texts wherever they stand in its prompt."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from kvloom import BackendError, ConfigError, Engine, EngineConfig, Segment, check_config, one_line
from kvloom_connector_transformers import check_call, signature, spec_of

from ..retrievers.load_task import LoadTask
from ..retrievers.passages import PassageRetriever
from .runner import Prefilled, Runner

log = logging.getLogger("kvloom.blend")

_ATTEMPTS = 3
"""Maximum number of passes begun because KV was lost on the way; after that nothing is retrieved."""

_CHANGED = "is not what it was when it was opened: other weights, adapters or autocast"


def blended(model: Any, config: str | Path | Mapping[str, Any] | EngineConfig) -> BlendedModel:
    """A transformers model with an engine whose configuration has a `blend` block.

    ConfigError if the configuration cannot work; ValueError if K of this model cannot be moved to other positions, or
    does not come out as the model itself would compute it there.
    """
    config = EngineConfig.load(config)
    _check(config)
    check_config(config)  # before every weight is read
    if any(weights.is_meta for weights in model.parameters()):
        raise ValueError("model: has no weights (device `meta`); load them first")
    engine = Engine.open(config, spec_of(model))
    try:
        return BlendedModel._of(model, engine)
    except BaseException:
        engine.close()
        raise


class BlendedModel:
    """Prefills prompts with KV of known texts. The model's code is not changed; one pass at a time.

    Blended KV is approximate: it is returned to the caller and never stored. KV computed without blending is stored, as
    a prefix and by its passages.
    """

    def __init__(self, model: Any, engine: Engine, *, owner: bool = False) -> None:
        """Use `blended`; or this, with an engine of one's own. owner: close the engine with it."""
        _check(engine.config)
        if engine.spec != spec_of(model):
            raise ValueError("engine: was opened for the KV of another model, or of another state of this one")
        self._begin(model, engine, owner=owner)

    @classmethod
    def _of(cls, model: Any, engine: Engine) -> BlendedModel:
        """With an engine that was opened for just this state of the model: its weights are not read again."""
        it = cls.__new__(cls)
        it._begin(model, engine, owner=True)
        return it

    def _begin(self, model: Any, engine: Engine, *, owner: bool) -> None:
        assert engine.blending is not None
        self.model = model
        self.engine = engine
        self.executor = engine.blending.executor
        self.retriever = engine.blending.retriever
        self.runner = Runner(model, engine.spec)
        self._state = signature(model)
        self.last: Prefilled | None = None
        """The start of the latest `generate`, without its cache, which `generate` has extended."""
        self._owner = owner
        self._vocabulary = int(self.runner.model.config.get_text_config(decoder=True).vocab_size)
        if isinstance(self.retriever, PassageRetriever):
            self.retriever.check_vocabulary(self._vocabulary)

    def remember(self, tokens: torch.Tensor, *, salt: str | None = None) -> int:
        """Compute a passage alone, behind the retriever's `lead`, and store its KV; return its number of tokens.

        tokens: 1-D, of the passage. If it is stored already, nothing is computed, and 0 returned. Raises ValueError if
        the model has changed since it was opened, because its KV would be another model's.
        """
        if self._has_changed():
            raise ValueError(f"model: {_CHANGED}")
        if not isinstance(self.retriever, PassageRetriever):
            raise TypeError(f"retriever {self.retriever.type!r} cannot remember passages")
        tokens = self._checked(tokens, "tokens")
        self.retriever.check_passage(tokens)
        segments = self.retriever.alone(tokens, salt=salt)
        self.retriever.learn(tokens, salt=salt)
        if bool(self.engine.find(segments).all()):
            return 0
        lead = torch.tensor(self.retriever.lead, dtype=tokens.dtype)
        (cache,) = self.runner.prefill([torch.cat([lead, tokens])]).caches
        moved = [Segment(one.start + len(lead), one.end + len(lead), one.key) for one in segments]
        self.engine.save(moved, cache=cache).result()
        return sum(one.end - one.start for one in segments)

    def prefill(
        self, prompts: torch.Tensor | Sequence[torch.Tensor], *, boundaries: Sequence[Sequence[int]] | None = None,
        keep_logits: int = 1, salt: str | None = None, store: bool = True, blend: bool = True,
    ) -> Prefilled:  # fmt: skip
        """KV and logits of one prompt (1-D token ids) or of several, in one pass.

        boundaries: the beginnings of each prompt's passages, for the `explicit` retriever. keep_logits: number of last
        tokens whose logits are returned; these are computed, not reused. store: store KV computed without blending.
        blend: False computes everything, so that passages known in other contexts are stored in this one too. Tiers
        that fail are misses, and KV that is lost on the way is computed.
        """
        one = isinstance(prompts, torch.Tensor)
        rows = [self._checked(row, "prompts") for row in ([prompts] if one else prompts)]
        if keep_logits < 1:
            raise ValueError(f"keep_logits: {keep_logits}; the last token's are needed")
        if not rows or any(len(row) < keep_logits for row in rows):
            raise ValueError(f"prompts: expected 1-D token ids of at least {keep_logits} tokens each (keep_logits)")
        if self._has_changed():
            return self.runner.prefill(rows, keep_logits=keep_logits, note=_CHANGED)
        if blend:
            done = self._blend(rows, boundaries, keep_logits, salt)
        else:
            done = self.runner.prefill(rows, keep_logits=keep_logits)
        if store and done.exact:
            self._keep(rows, done.caches, boundaries, salt)
        return done

    def generate(
        self, inputs: torch.Tensor | None = None, generation_config: GenerationConfig | None = None, *,
        boundaries: Sequence[int] | None = None, salt: str | None = None, store: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """`model.generate` from the blended KV of one prompt, with the same arguments.

        inputs (or input_ids): `[1, tokens]` or `[tokens]`, and an attention_mask of the same shape. ValueError, naming
        the argument, for a call that stored KV cannot serve, as for `cached`.
        """
        if inputs is not None and inputs.dim() == 1:
            inputs = inputs[None]
            mask = kwargs.get("attention_mask")
            if isinstance(mask, torch.Tensor) and mask.dim() == 1:
                kwargs["attention_mask"] = mask[None]
        ids = check_call(self.model, inputs, generation_config, kwargs)
        if ids.shape[0] != 1:
            raise ValueError(f"input_ids: expected one prompt, got {list(ids.shape)}; `prefill` takes several")
        bounds = None if boundaries is None else [boundaries]
        done = self.prefill(ids[0], boundaries=bounds, salt=salt, store=store)
        self.last = replace(done, caches=[])
        (cache,) = done.caches
        # `generate` computes the last token of the prompt, so that the first new one is sampled as all others are.
        cache.crop(-1)
        ids = ids.to(self.runner.device)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("input_ids", "attention_mask")}
        return self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=generation_config,
            past_key_values=cache, use_cache=True, **kwargs,
        )  # fmt: skip

    def close(self) -> None:
        """Close the engine, if it is this one's. Idempotent."""
        if self._owner:
            self.engine.close()

    def __enter__(self) -> BlendedModel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _blend(
        self, rows: Sequence[torch.Tensor], boundaries: Sequence[Sequence[int]] | None, keep: int, salt: str | None
    ) -> Prefilled:
        assert self.engine.blending is not None
        least = self.engine.blending.min_tokens
        if max(map(len, rows)) < least:
            return self.runner.prefill(rows, keep_logits=keep, note=f"shorter than {least} tokens (min_tokens)")
        if not isinstance(self.retriever, PassageRetriever) and (salt is not None or boundaries is not None):
            raise ValueError(f"salt, boundaries: retriever {self.retriever.type!r} does not take them")
        tokens = torch.cat(list(rows)).to(self.runner.device)
        starts = torch.tensor([0, *accumulate(map(len, rows))])
        extra = {"salt": salt, "boundaries": boundaries} if isinstance(self.retriever, PassageRetriever) else {}
        for _ in range(_ATTEMPTS):
            task = self.retriever.new_request(tokens, starts, **extra)
            began = time.monotonic()
            try:
                done = self.runner.blend(rows, task, self.executor, keep_logits=keep, min_tokens=least)
            except BackendError as error:
                log.warning("a prefill of %d tokens begins anew: %s", len(tokens), one_line(error))
                continue
            finally:
                if isinstance(task, LoadTask):
                    task.close()
            if done.blended_tokens:
                computed = round(done.computed_share * done.prompt_tokens)
                reused = done.prompt_tokens - computed
                self.engine.blending.done(
                    reused_tokens=reused, computed_tokens=computed, seconds=time.monotonic() - began
                )  # fmt: skip
            return done
        return self.runner.prefill(rows, keep_logits=keep, note="KV was lost on the way, again and again")

    def _checked(self, tokens: torch.Tensor, name: str) -> torch.Tensor:
        """On CPU. Raises ValueError unless these are 1-D token ids of the model."""
        if not isinstance(tokens, torch.Tensor) or tokens.dim() != 1 or tokens.is_floating_point():
            raise ValueError(f"{name}: expected 1-D integer tensors of token ids")
        tokens = tokens.cpu()
        if tokens.numel() and not (int(tokens.min()) >= 0 and int(tokens.max()) < self._vocabulary):
            raise ValueError(f"{name}: ids go from 0 to {self._vocabulary - 1}, the vocabulary's last")
        return tokens

    def _has_changed(self) -> bool:
        """Return whether its KV is another model's by now: adapters, weights or autocast have changed."""
        with self.runner.at_rest():  # a pass sets the model's attention to another function, which is no change
            now = signature(self.model)
            if now == self._state:
                return False
            if spec_of(self.model) != self.engine.spec:
                return True
            self._state = now
            return False

    def _keep(
        self, rows: Sequence[torch.Tensor], caches: Sequence[Any], boundaries: Sequence[Sequence[int]] | None,
        salt: str | None,
    ) -> None:  # fmt: skip
        for number, (tokens, cache) in enumerate(zip(rows, caches, strict=True)):
            self.engine.store(tokens, salt=salt, cache=cache)
            if isinstance(self.retriever, PassageRetriever):
                bounds = None if boundaries is None else boundaries[number]
                kept = self.retriever.in_context(tokens, bounds, salt=salt)
                self.engine.save(kept, cache=cache).result()
                self.retriever.learn(tokens, salt=salt)


def _check(config: EngineConfig) -> None:
    if config.blend is None:
        raise ConfigError("blend", "is not there; name an executor and a retriever")
    if config.connector.type != "transformers":
        raise ConfigError("connector", f"is {config.connector.type!r}; a transformers model needs `transformers`")
