"""Work on threads and in fresh processes, for requirements about both. Nothing that is started here is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

SECONDS = 30.0
_PROCESS_SECONDS = 120.0
"""Of a fresh interpreter, which may have to import torch on a machine with much else to do."""
_SWITCH_SECONDS = 1e-5
"""How often threads take turns: what goes wrong when they meet goes wrong sooner."""


def together(*functions: Callable[[], object], seconds: float = SECONDS) -> None:
    """Run each function on a thread of its own, all beginning at once; raises the first error of any of them."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], object]) -> None:
        try:
            start.wait(seconds)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in functions]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds)
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"a thread was still busy after {seconds:.0f} s"


def in_fresh_process(
    code: str, *arguments: str, hash_seed: str = "random", path: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """Run Python code in a new interpreter; what it printed. `sys.argv[1:]` there are `arguments`.

    hash_seed: its PYTHONHASHSEED. path: where it looks for modules first; default: where this process does.
    environment: variables that are others there.
    """
    paths = os.pathsep.join([*(path or sys.path)])
    variables = {**os.environ, **(environment or {}), "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=_PROCESS_SECONDS, check=False)
    assert done.returncode == 0, f"the process failed:\n{done.stderr.strip()[-2000:]}"
    return done.stdout
