"""The same component once more: for another model, or in a fresh process."""

from __future__ import annotations

import contextlib
import enum
import inspect
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from kvloom import KVSpec
from kvloom_testkit import subjects
from kvloom_testkit.running import with_torch

_REMAKE = """
import importlib, importlib.util, json, os, sys, tempfile

recipe = json.loads(sys.argv[1])
os.chdir(tempfile.gettempdir())
try:
    module = importlib.import_module(recipe["module"])
except ImportError:  # a module of tests, which is no package
    found = importlib.util.spec_from_file_location("the_module_of_the_component", recipe["file"])
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
cls = module
for name in recipe["class"].split("."):
    cls = getattr(cls, name)
from kvloom import KVSpec

component = cls(cls.Config.model_validate_json(recipe["config"]), KVSpec.from_json(recipe["spec"]))
"""

_ENVIRONMENT = {
    "TZ": "Pacific/Chatham", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "USER": "someone", "LOGNAME": "someone",
    "HOSTNAME": "elsewhere", "CUDA_VISIBLE_DEVICES": "5,3", "RANK": "6", "LOCAL_RANK": "2", "WORLD_SIZE": "8",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip
"""Variables that differ between the processes of one deployment."""


def spec_of(component: Any) -> KVSpec:
    """The model that a component was made for."""
    spec = getattr(component, "spec", None)
    return spec if isinstance(spec, KVSpec) else subjects.SPEC


def once_more(component: Any, *, spec: KVSpec | None = None) -> Any:
    """A new instance with the same settings, for the same model or for `spec`. The caller closes it."""
    return type(component)(component.config, spec or spec_of(component))


def with_other_settings(component: Any) -> Iterator[Any]:
    """Instances that each differ in one setting, for the same model. The caller closes them.

    Numbers, booleans and choices are varied, as far as the config and the constructor accept them; texts and paths are
    not, because valid ones are unknown.
    """
    config = component.config
    for name, field in type(config).model_fields.items():
        now = getattr(config, name)
        for value in _others(field.annotation, now):
            try:
                other = type(config).model_validate({**config.model_dump(), name: value})
                yield type(component)(other, spec_of(component))
            except ValueError:  # ConfigError and ValidationError are two
                continue


def by_another_path(component: Any, folder: Path) -> Iterator[Any]:
    """Instances whose settings name the same directory by a symbolic link, made in `folder`. The caller closes them."""
    config = getattr(component, "config", None)
    for number, name in enumerate(type(config).model_fields if isinstance(config, BaseModel) else ()):
        before, path = _directory_in(getattr(config, name))
        if path is None:
            continue
        link = folder / f"link-{number}"
        link.symlink_to(path, target_is_directory=True)
        with contextlib.suppress(ValueError):  # it takes none
            other = type(config).model_validate({**config.model_dump(), name: f"{before}{link}"})
            yield type(component)(other, component.spec)


def directories_of(component: Any) -> list[Path]:
    """The directories that the settings name."""
    config = getattr(component, "config", None)
    names = type(config).model_fields if isinstance(config, BaseModel) else ()
    return [path for name in names if (path := _directory_in(getattr(config, name))[1]) is not None]


def _directory_in(value: Any) -> tuple[str, Path | None]:
    """The prefix before the path, and the path itself if the setting is an existing directory."""
    text = str(value) if isinstance(value, str | Path) else ""
    before = "file://" if text.startswith("file://") else ""
    path = Path(text.removeprefix(before))
    return before, path if path.is_absolute() and path.is_dir() else None


def _others(annotation: Any, now: Any) -> list[Any]:
    """Other values of a type, that it may have."""
    if typing.get_origin(annotation) is typing.Literal:
        found: list[Any] = list(typing.get_args(annotation))
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        found = list(annotation)
    elif annotation in (bool, types.NoneType):
        found = [True, False] if annotation is bool else [None]
    elif annotation in (int, float):
        base = now if isinstance(now, int | float) else 4
        found = [base + 1, base - 1, 2 * base] if annotation is int else [base / 2, base * 2]
    else:
        found = [value for each in typing.get_args(annotation) for value in _others(each, now)]
    return [value for value in found if (type(value), value) != (type(now), now)]


def elsewhere(component: Any, code: str, *arguments: str) -> str:
    """Run Python code in another process, in which `component` is an instance with the same settings.

    Its hash seed, working directory and environment differ; its `sys.argv[2:]` are `arguments`. Returns its output.
    """
    cls = type(component)
    recipe = {
        "module": cls.__module__,
        "class": cls.__qualname__,
        "file": inspect.getsourcefile(cls),
        "config": component.config.model_dump_json(round_trip=True),
        "spec": spec_of(component).to_json(),
    }
    assert "<locals>" not in cls.__qualname__, f"{cls.__qualname__} is defined in a function: no other process finds it"
    return with_torch(_REMAKE + code, json.dumps(recipe), *arguments, environment=_ENVIRONMENT)
