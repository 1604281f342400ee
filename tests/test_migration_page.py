"""docs/coming-from-lmcache.md row by row: each names an example, which is run here, and which does what the row says.

An example is run under a profiler. A function or class that a row names must have been at work in it; a parameter,
field or setting must stand in it. What the rows of the configuration claim is held to `kvloom config import`.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import runpy
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest

from kvloom import ConfigError, EngineConfig
from kvloom_lmcache import import_config
from kvloom_lmcache.fields import MAPPED, NOT_MAPPED

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/coming-from-lmcache.md"
EXAMPLES = ROOT / "examples/from_lmcache"
ROW = re.compile(r"^\| `(?P<name>[^`]+)` \| (?P<kvloom>.+) \| [^|]+ \|$", re.MULTILINE)
REFERENCE = re.compile(r"`(kvloom[\w.]*(?:\(\w+\))?)`")
LINK = re.compile(r"\]\(\.\./examples/from_lmcache/(\w+)\.py\)")
NEEDS = {
    "blending": "kvloom_blend", "cachegen": "kvloom_serde_cachegen", "connectors": "kvloom_connector_vllm",
    "buffers": "kvloom_connector_vllm", "configuration": "kvloom_backend_mooncake",
}  # fmt: skip
"""Packages that are only installed where there is a C++ compiler."""
ON_GPUS = "kvloom_connector_vllm.paged.cuda"
"""At work only where there is a GPU."""
ROWS = list(ROW.finditer(PAGE.read_text(encoding="utf-8")))


@dataclass
class Run:
    """The calls that an example made."""

    codes: set[CodeType] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    """Names, attributes, keywords and keys of mappings that stand in it."""

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.codes}


@cache
def run(example: str) -> Run:
    """Run it under a profiler. An assertion of its own that fails, fails here."""
    path, done = EXAMPLES / f"{example}.py", Run()

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            done.codes.add(frame.f_code)

    # On a thread of its own, which is profiled: verbs of the main thread run on one that may be there already.
    threading.setprofile(called)
    try:
        with contextlib.redirect_stdout(io.StringIO()), ThreadPoolExecutor(1) as thread:
            thread.submit(runpy.run_path, str(path), run_name="__main__").result()
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    done.words = set(words(ast.parse(path.read_text(encoding="utf-8"))))
    return done


def words(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.keyword(arg=str(word)):
                yield word
            case ast.Dict(keys=keys):
                yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
            case ast.ImportFrom(module=str(module), names=names):
                yield from module.split(".")
                yield from (alias.name for alias in names)
            case ast.Import(names=names):
                yield from (word for alias in names for word in alias.name.split("."))


def resolved(path: str) -> tuple[Any, Any]:
    """The object of a dotted name, and the class or module that has it; (None, ...) for a field without a value."""
    parts = path.split(".")
    owner: Any = None
    found: Any = import_module(parts[0])
    for index, part in enumerate(parts[1:], start=1):
        owner = found
        if hasattr(found, part):
            found = getattr(found, part)
        elif isinstance(found, ModuleType):
            found = import_module(".".join(parts[: index + 1]))
        else:
            found = None
    return found, owner


def at_work(run: Run, reference: str) -> bool:
    """Return whether the example uses what a row's reference names."""
    path, _, parameter = reference.rstrip(")").partition("(")
    found, owner = resolved(path)
    last = path.rpartition(".")[2]
    if parameter and parameter not in run.words and not takes_any(found, parameter):
        return False
    if isinstance(found, ModuleType):
        return str(found.__file__) in run.files or last in run.words
    if inspect.isclass(found):
        return last in run.words or any(inspect.isclass(one) and issubclass(one, found) for one in owners(run))
    if inspect.isfunction(found) or inspect.ismethod(found):
        named = [code for code in run.codes if code.co_name == last]
        after_fork_in_child = inspect.unwrap(found).__code__ in named
        if inspect.isclass(owner):
            overridden = any(isinstance(one, type) and issubclass(one, owner) for one in map(owner_of, named))
            return overridden or (after_fork_in_child and owner.__name__ in run.words)
        return after_fork_in_child
    return last in run.words


def takes_any(found: Any, parameter: str) -> bool:
    """Return whether `parameter` takes keyword arguments of any name."""
    return inspect.signature(found).parameters[parameter].kind is inspect.Parameter.VAR_KEYWORD


def owners(run: Run) -> set[Any]:
    return set(map(owner_of, run.codes))


@cache
def modules_by_file(count: int) -> dict[str, ModuleType]:
    """Modules that were imported when there were `count`. Some import others when they are asked for a name."""
    found: dict[str, ModuleType] = {}
    for module in list(sys.modules.values()):
        found.setdefault(str(getattr(module, "__dict__", {}).get("__file__")), module)
    return found


@cache
def owner_of(code: CodeType) -> Any:
    """The class that a function was defined in, or None."""
    found: Any = modules_by_file(len(sys.modules)).get(code.co_filename)
    for part in code.co_qualname.split(".")[:-1]:
        found = getattr(found, part, None)
    return found if inspect.isclass(found) else None


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KVLOOM_CHUNK_TOKENS", "256")  # examples set it; it is put back


def of(example: str) -> list[re.Match[str]]:
    return [row for row in ROWS if example in LINK.findall(row["kvloom"])]


@pytest.mark.parametrize("example", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_does_what_its_rows_say(example: str, place: None) -> None:
    pytest.importorskip(NEEDS.get(example, "kvloom"))
    done, rows = run(example), of(example)
    assert rows, "no row links to it"
    missing = [
        (row["name"], references)
        for row in rows
        if (references := REFERENCE.findall(row["kvloom"]))
        and not any(at_work(done, one) or one.startswith(ON_GPUS) for one in references)
    ]
    assert missing == []


def test_every_row_links_to_an_example_or_says_why_it_has_none() -> None:
    assert len(ROWS) > 300
    alone = [row["name"] for row in ROWS if not LINK.search(row["kvloom"])]
    assert alone == [
        row["name"] for row in ROWS if row["kvloom"].startswith("none: ") and not LINK.search(row["kvloom"])
    ]


def test_what_was_not_at_work_is_noticed(place: None) -> None:
    done = run("tokens")
    assert at_work(done, "kvloom.TokenDatabase.segments(mask)") and at_work(done, "kvloom_tokens_radix.database")
    for reference in (
        "kvloom.Engine.store", "kvloom.Engine", "kvloom.TokenDatabase.segments(salt)", "kvloom.EngineConfig.chunk_size",
        "kvloom_serde_tensors", "kvloom.tiers.stored.tier.StoredTier.put",
    ):  # fmt: skip
        assert not at_work(done, reference), reference


# -- the rows of the configuration, against what is imported -----------------------------------------------------------

POOL = {"enable_p2p": True, "lookup_url": "mooncake://m:1"}
CLAIMS: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "chunk_size": (64, {}), "local_cpu": (False, {"local_disk": "/kv"}), "max_local_cpu_size": (7.0, {}),
    "local_disk": ("/kv", {}), "max_local_disk_size": (7, {"local_disk": "/kv"}), "remote_url": ("redis://h:1", {}),
    "remote_serde": ("torch", {"remote_url": "redis://h:1"}), "save_decode_cache": (True, {}),
    "enable_blending": (True, {}), "blend_recompute_ratio": (0.4, {"enable_blending": True}),
    "blend_min_tokens": (99, {"enable_blending": True}), "enable_p2p": (True, {"lookup_url": "mooncake://m:1"}),
    "lookup_url": ("mooncake://n:2", POOL), "distributed_url": ("tcp://h:8", POOL), "error_handling": (True, {}),
}  # fmt: skip
"""For each of LMCache's fields that has a row: a value, and the other fields that give it a meaning."""


def settings_of(config: Any, at: str = "") -> dict[str, Any]:
    """Every setting with its path: tiers by their types."""
    if isinstance(config, Mapping):
        return {key: value for name, node in config.items() for key, value in settings_of(node, f"{at}.{name}").items()}
    if isinstance(config, list | tuple) and config and isinstance(config[0], Mapping):
        return {key: value for node in config for key, value in settings_of(node, f"{at}.{node['type']}").items()}
    return {at.removeprefix("."): config}


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_field_becomes_what_its_row_says(name: str) -> None:
    (row,) = [row for row in ROWS if row["name"] == f"LMCacheEngineConfig.{name}"]
    value, context = CLAIMS[name]
    before, after = (import_config(fields, separator=[1]) for fields in (context, {**context, name: value}))
    paths = changed(settings_of(before.config), settings_of(after.config))
    outcome = next(one.outcome for one in after.rows if one.field == name)
    if row["kvloom"].startswith("none: "):
        assert not paths and outcome == "not needed"
        return
    assert outcome == "mapped"
    setting = REFERENCE.findall(row["kvloom"])[0].rpartition(".")[2]
    assert any(setting in path.split(".") for path in paths), (setting, paths)
    for kind in re.findall(r"type: (\w+)", row["kvloom"])[:1]:
        assert any(path.startswith(f"tiers.{kind}.") for path in paths)


@pytest.mark.parametrize("name", CLAIMS)
def test_from_defaults_gives_what_is_imported(name: str) -> None:
    value, context = CLAIMS[name]
    fields = {**context, name: value}
    imported = EngineConfig.load(import_config(fields, connector="plain", separator=[1]).tried())
    ours = EngineConfig.from_defaults(**{"local_cpu": True, **fields})
    assert [tier.type for tier in ours.tiers] == [tier.type for tier in imported.tiers]
    assert (ours.chunk_tokens, ours.save_decode_cache) == (imported.chunk_tokens, imported.save_decode_cache)
    assert (ours.blend is None) == (imported.blend is None)


BLENDING = {"enable_blending": True}
SAMPLES: Mapping[str, tuple[Any, dict[str, Any]]] = {
    **CLAIMS, "blend_recompute_ratios": ([0.4], BLENDING), "blend_check_layers": ([1], BLENDING),
    "blend_special_str": ("##", BLENDING), "store_location": ("LocalDiskBackend", {"local_disk": "/kv"}),
    "lmcache_instance_id": ("a", {}), "blocking_timeout_secs": (3, {"local_disk": "/kv"}),
    "cache_policy": ("LFU", {"local_disk": "/kv", "max_local_disk_size": 1}), "enable_kv_events": (True, {}),
    "internal_api_server_enabled": (True, {}), "local_cpu": (True, {}), "p2p_host": ("h", POOL),
    "save_unfull_chunk": (True, {}),
}  # fmt: skip
"""For each mapped field: a value, and the other fields that give it a meaning."""
FIELDS_PAGE = ROOT / "docs/use/import.md"


def told(name: str) -> str:
    """The row of a field in docs/use/import.md."""
    if (name in NOT_MAPPED and name not in SAMPLES) or name == "error_handling":
        known = NOT_MAPPED[name]
        return f"| `{name}` | {shown(known.default)} | {known.outcome}: {known.why} |"
    if name == "extra_config":
        return (
            f"| `{name}` | none | mapped: key by key, for the store of `remote_url`; secrets as environment variables |"
        )
    value, context = SAMPLES[name]
    done = import_config({**context, name: value}, connector="transformers", separator=[1])
    (text,) = [row.text for row in done.rows if row.field == name and row.outcome == "mapped"]
    return f"| `{name}` | {shown(MAPPED.get(name))} | mapped: {text} |"


def shown(default: Any) -> str:
    return "none" if default is None else f"`{str(default).lower() if isinstance(default, bool) else default}`"


def test_every_field_is_told_of_as_it_is_imported() -> None:
    table = FIELDS_PAGE.read_text(encoding="utf-8").partition("## Every field")[2]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    assert lines == [told(name) for name in sorted([*MAPPED, *NOT_MAPPED])]


@pytest.mark.parametrize("url", ["h:50051", "redis://h:6379", "http://h:1", "mooncake://h", "mooncake://u:p@h:1", None])
def test_what_is_no_master_of_mooncakes_is_one_in_neither_way(url: str | None) -> None:
    done = import_config({"enable_p2p": True, "lookup_url": url})
    assert done.tier("mooncake") is None and not done.complete
    with pytest.raises(ConfigError, match=r"^lookup_url: .*mooncake://HOST:PORT$"):
        EngineConfig.from_defaults(enable_p2p=True, lookup_url=url)
