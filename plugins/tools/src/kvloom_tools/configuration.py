"""The configuration that a verb is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvloom import EngineConfig
    from kvloom.inspection import Resolved

File = Annotated[Path, typer.Argument(metavar="FILE", help="A YAML configuration.")]


def load(file: Path, *, imported: bool = False) -> tuple[EngineConfig, Resolved]:
    """Load the configuration and resolve the plugins that it names. Raises ConfigError with all problems.

    imported: as `kvloom.check_config` takes it.
    """
    from kvloom import EngineConfig, check_config

    config = EngineConfig.from_file(file)
    return config, check_config(config, imported=imported)
