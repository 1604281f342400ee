"""The gate: a lossy mode is let onto a model only where it was seen to do that model no harm."""

from __future__ import annotations

from pathlib import Path

from kvloom import KVSpec, one_line
from kvloom_serde_cachegen.profile import Profile

_MEASURE = "run `kvloom calibrate --model MODEL --text FILE --verify`"
_OR_NOT = "or take the risk with `codec_gate: off`"
_MOST_TASKS = 8
"""That an error names."""


def profile_for(path: Path, spec: KVSpec | None) -> Profile:
    """The profile in a file. Raises ValueError if there is none, or one of KV of another shape than `spec` has."""
    try:
        profile = Profile.load(path.expanduser())
    except OSError as error:
        raise ValueError(f"profile: {path} cannot be read ({error.strerror}); {_MEASURE} --out {path}") from None
    if spec is None:
        return profile
    theirs = (profile.planes, profile.layers, profile.hidden, profile.head_size)
    ours = (spec.kv_planes, spec.num_layers, spec.hidden_dim, spec.head_size)
    if theirs != ours:
        raise ValueError(
            f"profile: {path} is of {one_line(profile.model)}, whose KV has (planes, layers, hidden, head size) "
            f"{theirs}, this model's has {ours}; {_MEASURE}"
        )
    return profile


def check(profile: Profile | None, spec: KVSpec, codec: str) -> None:
    """Raises ValueError unless `profile` says that `codec`, `step/0.75`, does the model of `spec` no harm."""
    if profile is None:
        raise ValueError(
            f"{codec} is lossy, and its effect on {spec.model} was not measured: {_MEASURE} and name the file "
            f"it writes in `profile`, {_OR_NOT}"
        )
    if profile.identity != spec.identity:
        raise ValueError(
            f"the profile is of another model ({one_line(profile.identity)}; this is {spec.identity}): {_MEASURE}, "
            f"{_OR_NOT}"
        )
    verdict = profile.verdicts.get(codec)
    if verdict is None:
        known = one_line(", ".join(sorted(profile.verdicts)) or "none")
        raise ValueError(f"the profile has no verdict on {codec}; use one that it has ({known}), {_MEASURE}, {_OR_NOT}")
    if not verdict.passed:
        limits = one_line(", ".join(f"{name} {limit:g}" for name, limit in sorted(verdict.limits.items())))
        tasks = "".join(
            f"; {one_line(task)} {verdict.scores[task]['codec']:.1%} of right answers, "
            f"{verdict.scores[task]['exact']:.1%} with exact KV"
            for task in verdict.worse[:_MOST_TASKS]
        )
        raise ValueError(
            f"{codec} failed on {one_line(profile.model)}: KL {verdict.kl:.2g}, dNLL {verdict.dnll:+.2g}, top-1 "
            f"{verdict.top1:.2%}, where the limits were {limits}{tasks}; take a smaller step, {_OR_NOT}"
        )
