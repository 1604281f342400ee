"""`scripts/vllm_api.py` tells what changed in vLLM's interfaces for connectors between two versions."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts/vllm_api.py"
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
OUTPUTS = "vllm/v1/outputs.py"
OLD = """
class Connector(ABC):
    size: int = 3
    def load(self, request: Request, *, wait: bool = True) -> int | None: ...
    def shutdown(self): ...
    def _own(self): ...
"""
NEW = """
class Connector(ABC):
    size: int = 4
    def load(self, request: Request, *, wait: bool = True, expedited: bool = False) -> int | None: ...
    @property
    def ready(self) -> bool: ...
    def _own(self, more): ...
class Results(NamedTuple):
    done: set[str]
"""


def compared(*trees: Path) -> list[str]:
    return subprocess.check_output([sys.executable, SCRIPT, *trees], text=True).splitlines()


def test_what_is_new_gone_or_changed_is_told_by_file(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new.whl"
    for name, text in ((BASE, OLD), (OUTPUTS, "class Same: ...")):
        (old / name).parent.mkdir(parents=True, exist_ok=True)
        (old / name).write_text(text)
    with zipfile.ZipFile(new, "w") as wheel:
        wheel.writestr(BASE, NEW)
        wheel.writestr(OUTPUTS, "class Same: ...")
    assert compared(old, new) == [
        "distributed/kv_transfer/kv_connector/v1/base.py",
        "  - Connector.size: int = 3",
        "  + Connector.size: int = 4",
        "  - Connector.load: (self, request: Request, *, wait: bool=True) -> int | None",
        "  + Connector.load: (self, request: Request, *, wait: bool=True, expedited: bool=False) -> int | None",
        "  - Connector.shutdown: (self)",
        "  + Connector.ready: @property (self) -> bool",
        "  + Results: class(NamedTuple)",
        "  + Results.done: set[str]",
    ]
    assert compared(old, old) == []
