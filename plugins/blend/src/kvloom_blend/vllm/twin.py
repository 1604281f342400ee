"""The twin: vLLM's model once more, in transformers, by which prompts are blended. Knows no vLLM."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvloom import Chunk, ChunkKey, ConfigError, EngineConfig, KVSpec, MemoryFormat, Segment
from kvloom_connector_vllm import Geometry, VLLMBlobConnector, VLLMConfig

from ..retrievers.passages import PassageRetriever
from ..runner.model import BlendedModel, blended
from ..runner.runner import Prefilled
from .orders import Prompt

log = logging.getLogger("vllm.kvloom.blend")  # others are not printed

_FEW_PASSAGES, _PASSAGE_TOKENS = 64, 8
"""Most passages of a prompt that is looked up: 64, and one more for every 8 tokens. Each is hashed and asked for by
itself, in the process that computes."""
_NO_KEY = ChunkKey("", 0, b"")
"""The key of blended KV, which is never stored."""


class Twin:
    """Blends a prompt at a time. `stored` may be called from another thread meanwhile."""

    def __init__(self, model: Any, config: EngineConfig) -> None:
        """Raises ConfigError or ValueError if the configuration, or the model, cannot be blended."""
        self.model: BlendedModel = blended(model, config)
        if not isinstance(self.model.retriever, PassageRetriever):
            self.model.close()
            text = f"{self.model.retriever.type!r} does not say what is stored; use separator, explicit or content"
            raise ConfigError("blend.retriever", text)
        self._retriever = self.model.retriever

    @classmethod
    def load(cls, name: str, config: EngineConfig, *, device: torch.device, **how: Any) -> Twin:
        """Load the weights a second time. how: `dtype`, `revision` and what else `from_pretrained` takes."""
        began = time.monotonic()
        model = AutoModelForCausalLM.from_pretrained(name, **how).to(device).eval()
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        twin = cls(model, config)
        log.info(
            "blending with %s and %s; the twin takes %d MiB on %s, loaded in %.1f s; fingerprint %s",
            twin.model.executor.type, twin.model.retriever.type, size >> 20, device, time.monotonic() - began,
            twin.model.engine.fingerprint,
        )  # fmt: skip
        return twin

    def check(self, spec: KVSpec) -> None:
        """Raise ValueError unless the twin's K and V are of vLLM's shape. spec: of vLLM's pages."""
        own = self.model.engine.spec
        for name in ("num_layers", "num_kv_heads", "head_size", "dtype", "kv_planes"):
            if getattr(own, name) != getattr(spec, name):
                raise ValueError(
                    f"{name}: {getattr(spec, name)} in vLLM, {getattr(own, name)} in transformers; "
                    "this model is not the same in both, and cannot be blended"
                )

    def stored(self, prompt: Prompt) -> int:
        """Count the tokens of a prompt that the tiers say they hold; 0 if a client cut it into too many passages."""
        tokens = torch.tensor(prompt.tokens)
        if len(self._retriever.passages(tokens, prompt.boundaries)) > _FEW_PASSAGES + len(tokens) // _PASSAGE_TOKENS:
            return 0
        prefix, found = self._retriever.stored(tokens, prompt.boundaries, salt=prompt.salt)
        return sum(one.end - one.start for one in (*prefix, *found))

    def blend(self, prompt: Prompt) -> Prefilled:
        """Its KV; nothing of it is stored."""
        bounds = None if prompt.boundaries is None else [prompt.boundaries]
        return self.model.prefill(torch.tensor(prompt.tokens), boundaries=bounds, salt=prompt.salt, store=False)

    def remember(self, tokens: Sequence[int], salt: str | None) -> int:
        """Keep a passage: `BlendedModel.remember`."""
        return self.model.remember(torch.tensor(tokens), salt=salt)

    def close(self) -> None:
        self.model.close()


class Pages:
    """vLLM's memory, which blended KV is written to."""

    def __init__(self, views: Sequence[torch.Tensor], order: torch.Tensor, spec: KVSpec, geometry: Geometry) -> None:
        """views: `[num_blocks, page_elements]` of each layer. order: see `VLLMBlobConnector`."""
        self._where = {"pages": tuple(views), "order": order}
        self._connector = VLLMBlobConnector(VLLMConfig(geometry=geometry), spec)
        self._shape = (spec.num_layers, spec.num_kv_heads * spec.head_size)
        self._dtype = spec.torch_dtype
        self._block_tokens = geometry.block_tokens

    @torch.inference_mode()
    def write(self, cache: Any, blocks: Sequence[int], num_tokens: int) -> None:
        """Write the first `num_tokens` tokens of a DynamicCache to blocks of one request; done on return.

        The rest of the last block becomes zero: vLLM writes there before it reads.
        """
        needed = -(-num_tokens // self._block_tokens)
        if len(blocks) < needed:
            raise ValueError(f"blocks: {len(blocks)} of {self._block_tokens} tokens for {num_tokens}")
        layers, hidden = self._shape
        whole = needed * self._block_tokens
        device = cache.layers[0].keys.device
        planes = torch.zeros(2, layers, whole, hidden, dtype=self._dtype, device=device)
        for number, layer in enumerate(cache.layers):
            for plane, states in enumerate((layer.keys, layer.values)):
                planes[plane, number, :num_tokens] = states[0, :, :num_tokens].transpose(0, 1).flatten(1)
        where = {**self._where, "blocks": list(blocks[:needed]), "first_block": 0}
        self._connector.check(where, whole)
        chunk = Chunk(planes, MemoryFormat.KV_BLOB, whole)
        fence = self._connector.write([Segment(0, whole, _NO_KEY)], [chunk], **where)
        if fence is not None:
            fence.wait()
