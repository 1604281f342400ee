"""The wheels in dist/ as requirements for pip, each with all its extras: python scripts/wheels.py > requirements.txt"""

from __future__ import annotations

import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

DIST = Path(__file__).parents[1] / "dist"
EXCLUDED = {
    "kvloom-backend-mooncake": {"cuda": "it brings the same modules as `cpu`, built for CUDA: one or the other"}
}
"""Extras that cannot be installed beside the others, and why."""


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(opened.read(name))


def wheels() -> dict[str, Path]:
    """The wheel of each distribution."""
    return {metadata(wheel)["Name"]: wheel for wheel in sorted(DIST.glob("*.whl"))}


def extras_of(about: Message) -> list[str]:
    return [extra for extra in about.get_all("Provides-Extra") or [] if extra not in EXCLUDED.get(about["Name"], {})]


if __name__ == "__main__":
    for name, wheel in wheels().items():
        print(f"{name} @ {wheel.as_uri()}")  # and without extras, too: pip takes these for two
        if extras := extras_of(metadata(wheel)):
            print(f"{name}[{','.join(extras)}] @ {wheel.as_uri()}")
