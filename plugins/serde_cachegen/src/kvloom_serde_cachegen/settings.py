"""The settings of the codec. Imports no torch, so that a configuration is checked without it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvloom import Config

QUALITY = {
    "step": {"high": 0.25, "default": 0.375, "small": 0.75},
    "klt": {"high": 0.25, "default": 0.5, "small": 0.75},
}
"""By mode: quantiser steps in standard deviations, in `step` those of V, of which K has half. Chosen by scores of tasks
on a real model: evals/README.md."""
MOST_STEP = 4.0
_GATED_STEP = 0.75
"""Steps from this one on go through the gate, unless the configuration says otherwise."""


class CodecConfig(Config):
    """The settings of the codec."""

    mode: Literal["step", "klt", "lossless", "cachegen"] = "step"
    """`step`: uniform steps, of each channel for K and of a layer for V. `klt`: steps of what channels have in
    common, which only the profile of a model tells. `lossless`: every bit comes back. `cachegen`: a scale for each
    token and as many levels as LMCache's CacheGen has."""
    quality: Literal["high", "default", "small"] | Annotated[float, Field(gt=0.0, le=MOST_STEP)] = "default"
    """For `step` and `klt`: the steps in standard deviations, in `step` those of V; by name 0.25, 0.375 (in `klt` 0.5),
    and 0.75."""
    profile: Path | None = None
    """The output of `kvloom calibrate` for this model: `klt` needs it; in `step` the steps follow it."""
    codec_gate: bool | None = None
    """For both: refuse to start unless the profile says that this step does the model no harm. The default is `on`
    for `klt` and for steps of 0.75 or more (`small`), and `off` for others."""
    threads: Annotated[int, Field(ge=0, le=256)] = 0
    """Number of threads that work on one chunk; 0: as many as there are processors."""

    @model_validator(mode="after")
    def _belong_together(self) -> CodecConfig:
        for name, unset in (("quality", "default"), ("profile", None), ("codec_gate", None)):
            if self.mode not in ("step", "klt") and getattr(self, name) != unset:
                raise ValueError(f"{name} is a setting of mode: step and mode: klt, not of {self.mode}")
        if self.mode == "klt" and self.profile is None:
            raise ValueError("mode: klt needs a profile: run `kvloom calibrate --model MODEL --text FILE --verify`")
        return self

    @property
    def step(self) -> float:
        if isinstance(self.quality, str):
            return QUALITY["klt" if self.mode == "klt" else "step"][self.quality]
        return self.quality

    @property
    def gated(self) -> bool:
        if self.codec_gate is None:
            return self.mode == "klt" or (self.mode == "step" and self.step >= _GATED_STEP)
        return self.codec_gate
