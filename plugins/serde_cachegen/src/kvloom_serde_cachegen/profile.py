"""Profiles: the results of calibration for one model's KV, in a file with a checksum over every byte."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors import torch as file_of

from kvloom import KVLoomError, one_line, replace_file

FORMAT = "kvloom-kv-profile/1"
POSITION_BITS = 24
"""Positions below 2^24 can be told from a profile."""
RANK_UNIT = 32
MAX_EXPONENT = 5
_MOST_BYTES = 1 << 30
"""Maximum size of a profile; those of large models have some 100 MiB."""
_MOST_HEADER_BYTES = 1 << 20
_MOST_RANKS = 1 << 14
"""Maximum number of planes and layers, each of which becomes a tensor."""
T = TypeVar("T")

_ABOUT = ("model", "identity", "planes", "layers", "hidden", "head_size", "calibrated_tokens", "rotary_size",
          "interleaved")  # fmt: skip


class CorruptProfileError(KVLoomError, ValueError):
    """A file that is not a profile, or is damaged. The message starts with its path."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The effect of one mode and step on the model, on text that it was not calibrated on."""

    dnll: float
    """Nats per token that the text got less likely."""
    kl: float
    """Nats per token between the distributions of the next token, mean over windows."""
    kl_error: float
    """The standard error of that mean."""
    top1: float
    """Part of the tokens whose likeliest successor stayed the same."""
    bits_per_value: float
    tokens: int
    """Number of predicted tokens."""
    passed: bool
    limits: Mapping[str, float] = field(default_factory=dict)
    """Limits for `dnll`, `kl` and `top1`."""
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By task: the shares of right answers with `exact` KV and after the `codec`, and the 95 % interval of their
    difference, `low` to `high`. Empty if no task was measured."""

    def __post_init__(self) -> None:
        for task, score in self.scores.items():
            if sorted(score) != ["codec", "exact", "high", "low"] or not all(
                type(each) is float and math.isfinite(each) for each in score.values()
            ):
                raise ValueError(f"scores: {task}: {score!r}")

    @property
    def worse(self) -> list[str]:
        """The tasks whose score is below that of exact KV by more than its interval."""
        return [task for task, score in self.scores.items() if score["high"] < 0]

    def with_scores(self, scores: Mapping[str, Mapping[str, float]]) -> Verdict:
        """The verdict on text and tasks: it fails if any task got worse."""
        made = replace(self, scores=scores)
        return replace(made, passed=self.passed and not made.worse)


@dataclass(frozen=True, eq=False)
class Transform:
    """The transform of the mode `klt` for the KV of each plane and layer, with K taken before RoPE.

    Component j of `x` is `((x - mean) * scale) @ U[:, j]`, and `U[:, j]` is `bases[j] * 2^-exponents[j] / 127`.
    """

    means: torch.Tensor
    """float32 `[planes, layers, hidden]`"""
    scales: torch.Tensor
    """float32 `[planes, layers, hidden]`, positive, of mean 1 in each layer: how much noise in a channel matters."""
    sigmas: torch.Tensor
    """float32 `[planes, layers]`, positive: what steps are multiples of."""
    bases: tuple[tuple[torch.Tensor, ...], ...]
    """By plane and layer: int8 `[rank, hidden]`, of the greatest variance first; rank is a multiple of 32, or all."""
    exponents: tuple[tuple[torch.Tensor, ...], ...]
    """By plane and layer: uint8 `[rank]`, 0 to 5."""

    def __post_init__(self) -> None:
        planes, layers, hidden = self.means.shape if self.means.dim() == 3 else (0, 0, 0)
        _check("means", self.means, torch.float32, (planes, layers, hidden))
        _check("scales", self.scales, torch.float32, (planes, layers, hidden), least=0.0)
        _check("sigmas", self.sigmas, torch.float32, (planes, layers), least=0.0)
        for name in ("bases", "exponents"):
            if [len(row) for row in getattr(self, name)] != [layers] * planes:
                raise ValueError(f"{name}: not one for each of {planes} planes and {layers} layers")
        for bases, exponents in zip(_flat(self.bases), _flat(self.exponents), strict=True):
            rank = len(bases) if bases.dim() == 2 else 0
            if not (0 < rank <= hidden and (rank % RANK_UNIT == 0 or rank == hidden)):
                raise ValueError(f"bases: rank {rank} of {hidden} channels, not all and no multiple of {RANK_UNIT}")
            _check("bases", bases, torch.int8, (rank, hidden))
            _check("exponents", exponents, torch.uint8, (rank,))
            if int(exponents.max()) > MAX_EXPONENT:
                raise ValueError(f"exponents: {int(exponents.max())} is over {MAX_EXPONENT}")

    def ranks(self, plane: int) -> list[int]:
        """The number of components that each layer of a plane keeps."""
        return [len(bases) for bases in self.bases[plane]]


@dataclass(frozen=True, eq=False)
class Profile:
    """Statistics of one model's KV. Checked when it is made: ValueError if they are invalid."""

    model: str
    """For people to read."""
    identity: str
    """Weights and config, as `KVSpec.identity` has it."""
    planes: int
    layers: int
    hidden: int
    head_size: int
    calibrated_tokens: int
    weights: torch.Tensor
    """float32 `[planes, layers, hidden]`: relative steps of channels for the mode `step`, of geometric mean 1 in each
    plane of a layer. `[layers, hidden]` in older profiles: those of K alone."""
    rotary_size: int
    """Number of first channels of each head that are rotated by position; even, 0 if none are."""
    interleaved: bool
    """Channels 2i and 2i + 1 are rotated together; else i and i + rotary_size / 2."""
    rotations: torch.Tensor
    """float32 `[24, rotary_size / 2, 2]`: cosine and sine of the angle of 2^b positions."""
    transform: Transform | None = None
    """The transform for the mode `klt`."""
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    """By mode and step, `step/0.75`."""

    def __post_init__(self) -> None:
        for name, least in (("planes", 1), ("layers", 1), ("hidden", 1), ("head_size", 1), ("calibrated_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is less than {least}")
        if self.planes > 2 or self.hidden % self.head_size:
            raise ValueError(f"impossible: {self.planes} planes of {self.hidden} channels in heads of {self.head_size}")
        if self.rotary_size % 2 or not 0 <= self.rotary_size <= self.head_size:
            raise ValueError(f"rotary_size: {self.rotary_size} of {self.head_size}")
        _check("weights", self.steps, torch.float32, (len(self.steps), self.layers, self.hidden), least=0.0)
        if len(self.steps) not in (1, self.planes):
            raise ValueError(f"weights: of {len(self.steps)} planes, not {self.planes}")
        _check("rotations", self.rotations, torch.float32, (POSITION_BITS, self.rotary_size // 2, 2))
        if not bool(((self.rotations.double().square().sum(-1) - 1).abs() < 1e-6).all()):
            raise ValueError("rotations: not cosines and sines")
        if self.transform is not None and self.transform.means.shape != (self.planes, self.layers, self.hidden):
            raise ValueError(
                f"transform: of {tuple(self.transform.means.shape)}, not {(self.planes, self.layers, self.hidden)}"
            )

    @property
    def steps(self) -> torch.Tensor:
        """The weights of each plane that has some, `[planes, layers, hidden]`."""
        return self.weights if self.weights.dim() == 3 else self.weights[None]

    @cached_property
    def id(self) -> bytes:
        """16 bytes that name everything that decoding depends on; the same on every machine."""
        tensors = {"rotations": self.rotations, **({} if self.transform is None else _packed(self.transform))}
        about = {name: getattr(self, name) for name in ("rotary_size", "interleaved", "head_size")}
        return _digest(_text(about), tensors)[:16]

    def save(self, path: Path) -> None:
        """Write it to `path`, which is replaced at once. Raises OSError."""
        replace_file(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """The file of it."""
        tensors = {"weights": self.weights, "rotations": self.rotations}
        if self.transform is not None:
            tensors |= _packed(self.transform)
        about = _text(
            {name: getattr(self, name) for name in _ABOUT}
            | {"verdicts": {name: asdict(verdict) for name, verdict in self.verdicts.items()}}
        )
        # One entry, because the order of several is not fixed.
        head = {"format": FORMAT, "about": about, "sha256": _digest(about, tensors).hex()}
        return file_of.save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"kvloom": _text(head)})

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Load the profile in a file. Raises OSError, or CorruptProfileError unless it is exactly as it was saved."""
        data = _content(path)
        try:
            tensors = file_of.load(data)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            head = json.loads(header.get("__metadata__", {}).get("kvloom", "{}"))
            if head.get("format") != FORMAT:
                raise ValueError(f"its format is {head.get('format')!r}, not {FORMAT!r}")
            if head["sha256"] != _digest(head["about"], tensors).hex():
                raise ValueError("it is not as it was saved (checksum)")
            return _unpacked(json.loads(head["about"]), tensors)
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
            raise CorruptProfileError(path, f"unusable profile: {one_line(error)}") from error


def _content(path: Path) -> bytes:
    """Read a regular file of a bounded length, without waiting. Raises OSError or CorruptProfileError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
        os.close(fd)
        raise CorruptProfileError(path, f"not a profile: not a file, or one of {status.st_size} bytes")
    with open(fd, "rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if length > _MOST_HEADER_BYTES:
            raise CorruptProfileError(path, f"not a profile: a header of more than {_MOST_HEADER_BYTES} bytes")
        if len(head) + length + _size_of(path, file.read(length)) != status.st_size:
            raise CorruptProfileError(path, f"unusable profile: {status.st_size} bytes are not what its header says")
        file.seek(0)
        return file.read(status.st_size)


def _size_of(path: Path, header: bytes) -> int:
    """The number of bytes behind a header: a file may seem to be of any length. Raises CorruptProfileError."""
    try:
        tensors = [about for name, about in json.loads(header).items() if name != "__metadata__"]
        return max((int(about["data_offsets"][1]) for about in tensors), default=0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptProfileError(path, f"not a profile: {one_line(error)}") from None


def rotations_of(frequencies: torch.Tensor) -> torch.Tensor:
    """`Profile.rotations` from the angles of one position, `[rotary_size / 2]` in radians."""
    positions = 2.0 ** torch.arange(POSITION_BITS, dtype=torch.float64)
    angles = positions[:, None] * frequencies.double()
    return torch.stack([angles.cos(), angles.sin()], -1).float()


def quantised(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`Transform.bases` and `.exponents` of one plane and layer, from unit vectors `[rank, hidden]` in float64."""
    largest = vectors.abs().amax(1)
    exponents = (-largest.log2()).floor().clamp(0, MAX_EXPONENT)
    bases = (vectors * 127 * 2.0 ** exponents[:, None]).round().clamp(-127, 127)
    return bases.to(torch.int8), exponents.to(torch.uint8)


def _text(value: Any) -> str:
    """JSON, the same for equal values. ValueError for values that are not finite."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _packed(transform: Transform) -> dict[str, torch.Tensor]:
    ranks = [transform.ranks(plane) for plane in range(len(transform.bases))]
    return {
        "means": transform.means,
        "scales": transform.scales,
        "sigmas": transform.sigmas,
        "ranks": torch.tensor(ranks, dtype=torch.int32),
        "bases": torch.cat(_flat(transform.bases)),
        "exponents": torch.cat(_flat(transform.exponents)),
    }


def _unpacked(about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Profile:
    transform = None
    if "means" in tensors:
        ranks = tensors["ranks"]
        _check("ranks", ranks, torch.int32, (about["planes"], about["layers"]))
        if ranks.numel() > _MOST_RANKS:
            raise ValueError(f"ranks: {ranks.numel()}, more than {_MOST_RANKS}")
        if int(ranks.sum()) != len(tensors["bases"]):
            raise ValueError(f"bases: {len(tensors['bases'])} of {int(ranks.sum())}")
        parts = {name: iter(tensors[name].split(ranks.flatten().tolist())) for name in ("bases", "exponents")}
        rows = {name: tuple(tuple(next(part) for _ in row) for row in ranks) for name, part in parts.items()}
        transform = Transform(tensors["means"], tensors["scales"], tensors["sigmas"], rows["bases"], rows["exponents"])
    verdicts = {name: _typed(Verdict(**verdict)) for name, verdict in about.pop("verdicts").items()}
    if not all(
        type(limit) in (int, float) and math.isfinite(limit)
        for verdict in verdicts.values()
        for limit in verdict.limits.values()
    ):
        raise ValueError("limits: expected numbers")
    weights, rotations = tensors["weights"], tensors["rotations"]
    return _typed(Profile(**about, weights=weights, rotations=rotations, transform=transform, verdicts=verdicts))


def _typed(made: T) -> T:
    """Check the types of words, numbers and booleans made from JSON. Raises ValueError."""
    for each in fields(made):  # type: ignore[arg-type]
        value = getattr(made, each.name)
        wrong = each.type in ("str", "int", "float", "bool") and type(value).__name__ != each.type
        if wrong or (each.type == "float" and not math.isfinite(value)):
            raise ValueError(f"{each.name}: {value!r}")
    return made


def _digest(about: str, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """SHA-256 over words and tensors: names, dtypes, shapes and little-endian bytes."""
    state = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        array = tensor.contiguous().numpy()
        state.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        state.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return state.digest()


def _check(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], least: float | None = None
) -> None:
    """ValueError unless it is of this dtype and shape, finite, and above `least`."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name}: not finite")
    if least is not None and not bool((tensor > least).all()):
        raise ValueError(f"{name}: not above {least:g}")


def _flat(rows: tuple[tuple[torch.Tensor, ...], ...]) -> list[torch.Tensor]:
    return [each for row in rows for each in row]
