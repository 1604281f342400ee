"""Verdicts on executors: `kvloom blend verify --tasks` writes them to a file, which `blend.verdict` names."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvloom import ConfigError, KVSpec, one_line, replace_file

from .settings import RatioConfig

FORMAT = "kvloom-blend-verdicts/1"
_MOST_BYTES = 1 << 20
_MEASURE = "run `kvloom blend verify --model MODEL --tasks 16`"
_OR_NOT = "or take the risk without `verdict`"


def name_of(executor: str, config: RatioConfig) -> str:
    """The name of an executor with its settings: `epic/0.15`, and `cacheblend/0.15, metric k` where others than the
    ratio are not the defaults."""
    others = [
        f", {name} {getattr(config, name)}"
        for name, field in type(config).model_fields.items()
        if name not in ("recompute_ratio", "verdict") and getattr(config, name) != field.default
    ]
    return f"{executor}/{config.recompute_ratio:g}{''.join(others)}"


def save(file: Path, spec: KVSpec, verdicts: Mapping[str, Mapping[str, Any]]) -> None:
    """Write verdicts on the model of `spec` to a file, which is replaced at once. Raises OSError.

    verdicts: by `name_of`; the reasons why one `failed`, empty if it did not, and what else is known.
    """
    made = {"format": FORMAT, "model": spec.identity, "dtype": spec.dtype, "verdicts": verdicts}
    replace_file(file, json.dumps(made, indent=1) + "\n")


def check(file: Path, spec: KVSpec, name: str) -> None:
    """Raise ConfigError unless a file has a good verdict on the executor `name` for the model of `spec`."""
    try:
        model, dtype, verdicts = _loaded(file.expanduser())
        failed = [str(each) for each in verdicts[name]["failed"]] if name in verdicts else []
    except OSError as error:
        raise ConfigError("verdict", f"{file} cannot be read ({error.strerror}); {_MEASURE}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError("verdict", f"{file} is no file of verdicts; {_MEASURE}, {_OR_NOT}") from None
    if model != spec.identity:
        raise ConfigError(
            "verdict",
            f"{file} is of another model ({one_line(model)}, in {one_line(dtype)}; this is {spec.identity}, in "
            f"{spec.dtype}): {_MEASURE} with --dtype {spec.dtype}, {_OR_NOT}",
        )
    if name not in verdicts:
        known = one_line("; ".join(sorted(verdicts)) or "none")
        raise ConfigError("verdict", f"{file} has none on {name}; use one that it has ({known}), {_MEASURE}, {_OR_NOT}")
    if failed:
        raise ConfigError(
            "verdict",
            f"{name} failed on {spec.model}: {one_line('; '.join(failed))}; compute more again, {_OR_NOT}",
        )


def _loaded(file: Path) -> tuple[str, str, dict[str, Any]]:
    """Model, dtype and verdicts. Raises OSError, or another error for a file of anything else."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
        raise ValueError(file)
    made = json.loads(file.read_bytes())
    if made["format"] != FORMAT or not isinstance(made["verdicts"], dict):
        raise ValueError(file)
    return str(made["model"]), str(made["dtype"]), made["verdicts"]
