"""Nothing that a server runs changes what belongs to its whole process: its other threads would see it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHANGES = re.compile(
    r"\bos\.(?:umask|f?chdir|chroot|putenv|unsetenv|nice|setpriority|sched_setaffinity)\("
    r"|\bos\.environ(?:\[[^\]]*\] *=[^=]|\.(?:setdefault|update|pop|clear)\()"
    r"|\bsignal\.(?:signal|setitimer|alarm|set_wakeup_fd|pthread_sigmask|siginterrupt)\("
    r"|\blocale\.setlocale\(|\bresource\.(?:setrlimit|prlimit)\(|\bsocket\.setdefaulttimeout\("
    r"|\btorch\.(?:set_\w+|manual_seed|use_deterministic_algorithms)\(|\b(?:np\.)?random\.seed\("
    r"|\bsys\.set\w+\(|\bsys\.(?:stdout|stderr|excepthook) *=[^=]|\bthreading\.(?:stack_size|settrace|setprofile)\("
    r"|\bwarnings\.(?:simplefilter|filterwarnings|catch_warnings|resetwarnings)\("
    r"|\blogging\.(?:basicConfig|disable|setLoggerClass|captureWarnings)\(|\bgetLogger\(\)"
    r"|\bgc\.(?:disable|enable|freeze|set_threshold)\(|\bcontextlib\.(?:redirect_\w+|chdir)\("
    r"|\bset_start_method\(|\bmatplotlib\.use\(|\bfaulthandler\.\w+\("
)
ALLOWED = {
    "core/src/kvloom/runtime/system.py": "the priority of a thread alone, on Linux",
    "core/src/kvloom/numa.py": "the processors of a thread alone, on Linux",
    "core/src/kvloom/memory/pages.py": "torch in a forked child, whose threads of OpenMP are not there",
    "core/src/kvloom/cli/main.py": "all verbs",
    "plugins/tools/src/kvloom_tools/replay/sweep.py": "a verb",
    "plugins/tools/src/kvloom_tools/verbs/trace.py": "a verb; it puts the handlers back",
    "plugins/backend_mooncake/src/kvloom_backend_mooncake/client.py": "Mooncake's client reads variables, at any time",
    "plugins/blend/src/kvloom_blend/loading.py": "a verb",
    "plugins/blend/src/kvloom_blend/demo/report.py": "a verb",
    "plugins/connector_transformers/src/kvloom_connector_transformers/demo/report.py": "a verb",
    "plugins/eval/src/kvloom_eval/command.py": "a verb",
    "plugins/connector_transformers/src/kvloom_connector_transformers/demo/worker.py": "a verb",
}


def changing(folder: Path) -> set[str]:
    """The modules that do. What serves tests, in folders `testing`, is for processes of its own."""
    files = [one for name in ("core", "plugins") for one in (folder / name).glob("**/src/**/*.py")]
    changed = [one for one in files if CHANGES.search(one.read_text(encoding="utf-8"))]
    return {str(one.relative_to(folder)) for one in changed if "testing" not in str(one)}


def test_no_module_changes_what_belongs_to_the_process() -> None:
    assert changing(ROOT) <= set(ALLOWED)


def test_a_change_is_seen(tmp_path: Path) -> None:
    for number, line in enumerate(
        ("os.umask(0)", 'os.environ["A"] = "b"', "torch.set_num_threads(1)", "signal.signal(2, f)", "gc.disable()")
    ):
        file = tmp_path / "core" / "src" / f"m{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{line}\n")
    assert len(changing(tmp_path)) == 5
    file.write_text('known = os.environ["A"] == "b"\n')
    assert len(changing(tmp_path)) == 4
