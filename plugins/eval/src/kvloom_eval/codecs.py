"""Codecs by name: modes and steps of kvloom's serializer, and codecs of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from kvloom import KVLoomError, one_line
from kvloom_connector_transformers import spec_of
from kvloom_eval import peers
from kvloom_serde_cachegen import CacheGenConfig, CacheGenSerializer, Profile, calibrated, measuring

LEVELS = ("high", "default", "small")
PEERS: dict[str, Callable[[Any], measuring.Codec]] = {
    "fp8": lambda shape: peers.fp8,
    "int8": lambda shape: peers.int8(shape.head_size),
    "int4": lambda shape: peers.int4(shape.head_size),
    "kivi4": lambda shape: peers.kivi(4),
    "kivi2": lambda shape: peers.kivi(2),
    "lmcache-cachegen": lambda shape: peers.lmcache_cachegen(CacheGenConfig.for_layers(shape.num_layers).by_layer()),
}
"""From the spec of a model's KV."""
DEFAULT = (*LEVELS, "default+profile", "klt/0.25", "klt/0.5", "int8", "fp8", "int4", "kivi4", "kivi2")
_PROFILE = "+profile"
_WINDOW = 1024


@dataclass(frozen=True, slots=True)
class Wanted:
    """One codec of a run."""

    name: str
    settings: dict[str, Any] | None
    """Of the serializer; None for a peer."""

    @property
    def needs_profile(self) -> bool:
        return self.settings is not None and "profile" in self.settings

    def make(self, spec: Any, profile: Path | None) -> measuring.Codec:
        """spec: of the model's KV. profile: the file that a codec with `needs_profile` reads. Raises KVLoomError if it
        cannot be read, or is of KV of another shape."""
        if self.settings is None:
            return PEERS[self.name](spec)
        settings = {**self.settings, **({"profile": profile} if self.needs_profile else {})}
        try:
            return measuring.through(CacheGenSerializer(CacheGenSerializer.Config.model_validate(settings), spec))
        except ValueError as error:
            raise KVLoomError(f"--codec {self.name}: {error}") from error


def parsed(word: str) -> Wanted:
    """The codec of this name. Raises KVLoomError for one that is not known."""
    if word in PEERS:
        return Wanted(word, None)
    name, plus, rest = word.partition("+")
    mode, slash, quality = name.partition("/")
    if mode in LEVELS and not slash:
        mode, quality = "step", mode
    settings: dict[str, Any] = {"mode": mode, "threads": 1}
    try:
        if quality:
            settings["quality"] = quality if quality in LEVELS else float(quality)
        if plus or mode == "klt":
            settings["profile"] = Path(_PROFILE)
        if mode in ("step", "klt"):
            settings["codec_gate"] = False
        if (slash and not quality) or (plus and rest != "profile"):
            raise ValueError
        CacheGenSerializer.Config.model_validate(settings)
    except (ValidationError, ValueError):
        raise KVLoomError(
            f"--codec: there is no codec {word!r}; name a level ({', '.join(LEVELS)}), a mode and step as in step/0.5 "
            f"or klt/high, step/0.5{_PROFILE}, lossless, cachegen, or a peer ({', '.join(PEERS)})"
        ) from None
    return Wanted(word, settings)


def check_profile(file: Path) -> None:
    """Raise KVLoomError for a file that is no profile."""
    try:
        Profile.load(file)
    except OSError as error:
        raise KVLoomError(f"--profile: {file} cannot be read ({error.strerror}); make it: kvloom calibrate") from None


def profile_of(model: Any, tokens: torch.Tensor, name: str, file: Path, step: Callable[[], None]) -> Profile:
    """The profile of a model, made of windows `[windows, tokens]` and written to `file`, or the one that is there.
    Raises KVLoomError for one of another model."""
    if file.exists():
        found = Profile.load(file)
        if found.identity != (ours := spec_of(model).identity):
            raise KVLoomError(
                f"{file} is of another model ({one_line(found.identity)}; this is {ours}); remove it, or name another "
                "folder with --out"
            )
        return found
    profile, _ = calibrated(model, tokens, name=name, klt=True, step=step)
    profile.save(file)
    return profile


def through_chunks(codec: measuring.Codec, kv: torch.Tensor) -> tuple[torch.Tensor, float]:
    """KV `[2, layers, tokens, heads, head_size]` after a codec, in chunks as an engine stores it, and bits a value."""
    flat = kv.flatten(3)
    back, size = measuring.in_chunks(codec, flat, measuring.CHUNK_TOKENS)
    return back.view(kv.shape), 8 * size / flat.numel()
