"""Relative paths in a configuration begin where its file is, whatever the working directory is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel


def absolute(path: str | Path, directory: Path) -> str | Path:
    """`path` below `directory` if it is relative. `~`, and values that name no file, stay as they are."""
    text = os.fspath(path)
    if not text.strip() or "\0" in text or text.startswith("~") or os.path.isabs(text):
        return path
    return type(path)(directory / text)


def absolute_paths(
    model: type[BaseModel], settings: Mapping[str, Any], directory: Callable[[str], Path]
) -> Mapping[str, Any]:
    """`settings` with every path absolute: what `model` declares as a `Path`. directory: where one of a name begins."""
    changed = {
        name: absolute(settings[name], directory(name))
        for name, field in model.model_fields.items()
        if _is_path(field.annotation) and isinstance(settings.get(name), str | Path)
    }
    return {**settings, **changed} if changed else settings


def homeless(model: type[BaseModel], settings: Mapping[str, Any]) -> list[str]:
    """The names of the paths in `settings` that begin with the home directory of a user who is not known."""
    return [
        name for name, field in model.model_fields.items()
        if _is_path(field.annotation) and isinstance(settings.get(name), str | Path) and is_homeless(settings[name])
    ]  # fmt: skip


def is_homeless(path: str | Path) -> bool:
    text = os.fspath(path)
    return text.startswith("~") and os.path.expanduser(text) == text


def _is_path(annotation: Any) -> bool:
    return annotation is Path or any(map(_is_path, get_args(annotation)))
