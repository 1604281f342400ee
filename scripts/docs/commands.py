"""The reference of names and of commands, as the code has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kvloom

VERBS = (
    "init", "plugins", "doctor", "config check", "config show", "config schema", "config import", "plan", "stat", "why",
    "scrub", "warm", "trace record", "trace replay", "top", "serve", "demo", "blend verify", "blend demo", "new",
    "check",
)  # fmt: skip


def made() -> dict[str, str]:
    return {"reference/api.md": api(), "reference/commands.md": commands()}


def api() -> str:
    """Each public name, for mkdocstrings to fill in."""
    names = sorted(kvloom._HOME, key=lambda name: (kvloom._HOME[name], name))
    parts = [
        "# Public names\n",
        "`kvloom.__all__` and `kvloom.inspection`: plugins and applications use nothing else.\n",
    ]
    home = ""
    for name in names:
        if kvloom._HOME[name] != home:
            home = kvloom._HOME[name]
            parts.append(f"## kvloom.{home}\n")
        others = str(getattr(getattr(kvloom, name), "__module__", "kvloom"))
        if not others.startswith("kvloom"):
            parts.append(f"### {name}\n\nFrom {others.partition('.')[0]}.\n")
            continue
        parts.append(f"::: kvloom.{home}.{name}\n    options:\n      heading_level: 3\n      show_root_heading: true\n")
    parts.append("## kvloom.inspection\n\n::: kvloom.inspection\n    options:\n      heading_level: 3\n")
    return "\n".join(parts)


def commands() -> str:
    """The output of `--help` for each verb."""
    parts = ["# Commands\n"]
    for verb in VERBS:
        command = [str(Path(sys.executable).with_name("kvloom")), *verb.split(), "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        parts.append(f"## kvloom {verb}\n\n```text\n{done.stdout.strip()}\n```\n")
    return "\n".join(parts)
