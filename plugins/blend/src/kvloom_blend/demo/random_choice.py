"""`random`: selects tokens to compute again at random. The demo uses it through an entry point, like any plugin."""

from __future__ import annotations

from typing import cast

import torch
from pydantic import Field

import kvloom
from kvloom_blend.executors.static import StaticSession


class RandomExecutor(kvloom.BlendExecutor):
    type = "random"

    class Config(kvloom.Config):
        recompute_ratio: float = Field(default=0.15, ge=0.0, le=1.0)
        seed: int = 0

    def begin(self, request: kvloom.BlendRequest) -> kvloom.BlendSession:
        config = cast(RandomExecutor.Config, self.config)
        lots = torch.rand(len(request.valid_mask), generator=torch.Generator().manual_seed(config.seed))
        session = StaticSession(request)
        session.chosen = session.largest(lots, config.recompute_ratio)
        return session


@kvloom.hookimpl
def kvloom_blend_executors() -> list[type[kvloom.BlendExecutor]]:
    return [RandomExecutor]
