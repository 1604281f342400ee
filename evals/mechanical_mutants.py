"""Makes mutants of the kit's reference components with cosmic-ray's operators, and tries which ones the kit catches.

What `mutated_references.py` is made of. As a program, it is a process that tries mutants.
"""

from __future__ import annotations

import ast
import difflib
import gc
import json
import os
import queue
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

KIT = Path(__file__).resolve().parent.parent / "testkit" / "src"
REFERENCES = Path("kvloom_testkit", "reference")
SECONDS = 60.0
"""Time limit for all requirements on one mutant."""
CORRECT_SECONDS = 600.0
"""The same on the correct component, whose slowness proves nothing."""
TEST_SHARE = 1 / 4
"""Share of that for one requirement: the kit's own limit is for slow stores, and a mutant that hangs takes it all."""
TEST_FEWEST_SECONDS = 2.0
"""Time limit for one that is known to take next to no time."""
QUICK_SECONDS = 0.3
"""Maximum time of a requirement on the correct component, for it to be tried on a mutant that may survive."""
MEMORY_BYTES = 32 << 30
"""Limit of address space, most of which torch does not use."""
TRIES = 6
"""Number of times that a mutant must survive if it should not: in a race it may survive once."""


@dataclass(frozen=True)
class Mutant:
    """A reference with one change."""

    reference: str
    source: str
    operator: str
    before: str
    after: str
    """The lines that differ, stripped; empty if they are gone."""


# -- making mutants ----------------------------------------------------------------------------------------------------


def mutants_of(reference: str) -> Iterator[Mutant]:
    """Every change that makes another program of it."""
    try:
        from cosmic_ray.ast import ast_nodes, get_ast
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.operators.provider import OperatorProvider
    except ImportError:
        sys.exit("cosmic-ray makes the mutants, and is not installed: pip install 'cosmic-ray==8.7.0'")
    original = (KIT / REFERENCES / f"{reference}.py").read_text()
    nodes = list(ast_nodes(get_ast(original)))
    seen = {_meaning(original)}
    operators = OperatorProvider()
    for name in operators:
        if operators[name].arguments():  # works on variables that somebody has to name
            continue
        operator = operators[name]()
        for occurrence in range(sum(len(list(operator.mutation_positions(node))) for node in nodes)):
            source = mutate_code(original, operator, occurrence)
            meaning = _meaning(source)
            if meaning is not None and meaning not in seen:
                seen.add(meaning)
                yield Mutant(reference, source, name, *_difference(original, source))


def _meaning(source: str) -> str | None:
    """The program without docstrings and annotations, which nobody evaluates; None if it is none."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    return ast.dump(tree)


def _difference(original: str, source: str) -> tuple[str, str]:
    """The old and the new text."""
    lines = list(difflib.ndiff(original.splitlines(), source.splitlines()))
    before, after = (" ".join(line[2:].strip() for line in lines if line.startswith(mark)) for mark in ("- ", "+ "))
    return before, after


def components_of(reference: str) -> list[str]:
    """The classes in a reference that can be chosen in YAML."""
    tree = ast.parse((KIT / REFERENCES / f"{reference}.py").read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and any(isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "type" for line in node.body)
    ]


# -- trying them -------------------------------------------------------------------------------------------------------


def serve() -> None:
    """In a process of its own: for each line, a reference, its new source, a class of it, how long all requirements may
    take and how long those take that are tried, which one fails.

    What takes long is imported once. Each mutant is tried in a fork, so that nothing of it is left; its source is
    written too, because some requirements start fresh processes.
    """
    folder = Path.cwd()
    shutil.copytree(KIT, folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    sys.path.insert(0, str(folder / "src"))
    sys.dont_write_bytecode = True  # two changes within a second would be taken for one
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    import torch

    from kvloom_testkit import kinds

    torch.set_num_threads(1)  # a fork has none of its parent's threads
    for kind in kinds.CLASSES:
        kinds.conformance_of(kind)
    gc.collect()
    gc.freeze()  # else each fork goes through, and copies, all that was imported
    durations: dict[str, float] = {}
    for line in sys.stdin:
        reference, source, name, seconds, longest = json.loads(line)
        file = folder / "src" / REFERENCES / f"{reference}.py"
        original = file.read_text()
        file.write_text(source)
        print(json.dumps(_in_a_fork(reference, name, durations, seconds, longest)), flush=True)
        file.write_text(original)


def _in_a_fork(reference: str, name: str, durations: dict[str, float], seconds: float, longest: float) -> str:
    """The requirement that fails first, or another failure; empty if none.

    seconds: the limit. longest: requirements that take longer on the correct component are left out.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        os.close(reading)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        try:
            said = _check(reference, name, durations, seconds, longest)
        except BaseException as error:
            said = f"raises {type(error).__name__}"
        os.write(writing, json.dumps([said, durations]).encode() + b"\n")
        os._exit(0)
    os.close(writing)
    with open(reading) as answers:
        ready, _, _ = select.select([answers], [], [], seconds)
        answer = answers.readline() if ready else json.dumps(["hangs", {}])
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    said, measured = json.loads(answer or json.dumps(["dies", {}]))
    durations.update(measured)
    return str(said)


def _check(reference: str, name: str, durations: dict[str, float], seconds: float, longest: float) -> str:
    from importlib import import_module

    import pytest

    from kvloom_testkit import kinds, subjects
    from kvloom_testkit.pytest_plugin import INSTALLED
    from kvloom_testkit.requirements import requirement_id

    cls = getattr(import_module(f"kvloom_testkit.reference.{reference}"), name)
    kind = next(kind for kind in kinds.CLASSES if issubclass(cls, kinds.conformance_of(kind).contract))
    subjects.chosen[:] = [subjects.Subject(kind, cls.type, cls, {"path": "{tmp}"} if kind == "backend" else {})]

    class QuickOnesFirst:
        """So that most mutants are caught at once."""

        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items[:] = [item for item in items if durations.get(item.name, 0.0) <= longest]
            items.sort(key=lambda item: durations.get(item.name, 0.0))

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_setup(self, item: pytest.Item) -> None:
            usual = durations.get(item.name, seconds)
            item.config.option.kvloom_seconds = min(seconds * TEST_SHARE, TEST_FEWEST_SECONDS + 10 * usual)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            name = report.nodeid.rsplit("::", 1)[-1]
            if report.when == "call":
                durations[name] = report.duration
            if report.failed:
                failed.append(requirement_id(name) or name)

    failed: list[str] = []
    settings = [
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "kvloom_testkit.pytest_plugin",
        "--tb=short",
    ]
    where = ["--basetemp", "tmp", "--rootdir", str(INSTALLED.parent), "-c", str(INSTALLED.with_name("check.ini"))]
    status = pytest.main([*settings, *where, str(INSTALLED)], plugins=[QuickOnesFirst()])
    return ", ".join(failed) or ("" if status == pytest.ExitCode.OK else "does not load")


class Server:
    """A process that tries mutants."""

    def __init__(self, folder: Path) -> None:
        from kvloom_testkit.running import leave_ci

        folder.mkdir()
        self._whole: set[str] = set()
        command = [sys.executable, str(Path(__file__).resolve())]
        path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[1:])}
        leave_ci(path)
        self._process = subprocess.Popen(
            command, cwd=folder, env=path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def caught(self, mutant: Mutant, *, seconds: float = SECONDS, longest: float = SECONDS) -> str:
        """By what; empty if it survives.

        seconds: the limit. longest: it is not tried on requirements that take longer.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        if mutant.reference not in self._whole:  # what is caught without a change proves nothing
            self._whole.add(mutant.reference)
            correct = replace(mutant, source=(KIT / REFERENCES / f"{mutant.reference}.py").read_text())
            said = self.caught(correct, seconds=CORRECT_SECONDS)
            assert not said, f"{mutant.reference} fails without any change: {said}"
        for name in components_of(mutant.reference):
            self._process.stdin.write(json.dumps([mutant.reference, mutant.source, name, seconds, longest]) + "\n")
            self._process.stdin.flush()
            said = str(json.loads(self._process.stdout.readline()))
            if said:
                return said
        return ""

    def close(self) -> None:
        self._process.communicate()


def tried(mutants: list[Mutant], jobs: int, may_survive: Callable[[Mutant], object]) -> dict[Mutant, str]:
    """The requirement that detected each mutant; empty if it survives."""
    left: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        left.put(mutant)
    found: dict[Mutant, str] = {}

    def work(folder: Path) -> None:
        server = Server(folder)
        while True:
            try:
                mutant = left.get_nowait()
            except queue.Empty:
                return server.close()
            # What is known to survive would go through everything.
            said = server.caught(mutant, longest=QUICK_SECONDS if may_survive(mutant) else SECONDS)
            for _ in range(TRIES - 1):
                if not said and not may_survive(mutant):
                    said = server.caught(mutant)
            found[mutant] = said
            if len(found) % 10 == 0:
                survive = sum(not each for each in found.values())
                print(f"{len(found)} of {len(mutants)} mutants tried, {survive} survive", file=sys.stderr)

    with tempfile.TemporaryDirectory() as folder:
        threads = [threading.Thread(target=work, args=(Path(folder, str(number)),)) for number in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == len(mutants), "a process that tries mutants came to an end"
    return found


if __name__ == "__main__":
    serve()
