"""Whatever stands in a file of LMCache's: a configuration, or one line that names a field; never a traceback."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvloom import ConfigError, EngineConfig
from kvloom.cli.main import app
from kvloom_lmcache import Imported, import_config, import_environment
from kvloom_lmcache.fields import ALIASES, MAPPED, NOT_MAPPED

APP = app()
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-1, 600)
    | st.sampled_from([10**400, -(10**30), 1e308, 5e-324, 0.1, 0.00001])
    | st.floats()
    | TEXT
    | st.binary(max_size=4)
    | st.dates()
    | st.sampled_from(
        [
            "redis://h:1",
            "redis://:p@h",
            "s3://b",
            "mooncakestore://m:1",
            "lm://",
            "redis://[",
            "://",
            "file:///kv",
            "a,b",
            "mooncake://m:1",
            "h:1",
            "cachegen",
            "LFU",
            "LocalDiskBackend",
            "${env:X}",
            "$${",
            "${",
            "0.1,0.2",
        ]
    )
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.integers(), inner, max_size=3),
    max_leaves=6,
)
EXTRA = st.dictionaries(
    st.sampled_from(
        ["protocol", "metadata_server", "global_segment_size", "s3_region", "disable_tls", "redis_password"]
    ),
    VALUES,
    max_size=3,
)
KNOWN = st.sampled_from([*MAPPED, *NOT_MAPPED, *ALIASES])
FIELDS = st.dictionaries(KNOWN | st.sampled_from([*MAPPED]) | TEXT | st.integers(), VALUES, max_size=8)


def merged(fields: dict[Any, Any], extra: dict[str, Any] | None, likely: dict[str, Any]) -> dict[Any, Any]:
    return {**likely, **fields} if extra is None else {**likely, **fields, "extra_config": extra}


LIKELY = st.fixed_dictionaries(
    {},
    optional={
        "enable_blending": st.booleans(), "enable_p2p": st.booleans(), "local_cpu": st.booleans(),
        "remote_url": st.sampled_from(["redis://h:1", "s3://h:9/b", "mooncakestore://m:1", "fs://h:0/kv"]),
        "lookup_url": st.sampled_from(["mooncake://m:1", "m:1"]), "local_disk": st.sampled_from(["/kv", "kv,kv2"]),
    },
)  # fmt: skip
ANY = st.builds(merged, FIELDS, st.none() | EXTRA, LIKELY)


def attempt(work: Callable[[], Imported]) -> tuple[Imported | None, str]:
    """The result, or the first line of a ConfigError. Any other error fails the test."""
    try:
        return work(), ""
    except ConfigError as error:
        lines = str(error).splitlines()
        assert len(lines) == len(set(lines)) and all(": " in line for line in lines)
        return None, lines[0] if error.path else ""


@settings(max_examples=120, deadline=None)
@given(ANY, st.none() | st.just([1, 2]))
@example({10**15 + 1: None, -(10**15) - 1: None}, None)
def test_any_mapping_is_a_configuration_or_a_line(fields: dict[Any, Any], separator: list[int] | None) -> None:
    done, error = attempt(lambda: import_config(fields, separator=separator))
    if done is None:
        assert error
    else:
        EngineConfig.load(done.tried())
        rows = [row.field for row in done.rows]
        assert len(rows) == len(set(rows))
        assert {row if row in fields else row.partition(".")[0] for row in rows} == set(fields)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ANY, st.sampled_from([(), ("--strict",), ("--json",)]))
def test_any_file_is_a_configuration_or_a_line(tmp_path: Path, fields: dict[Any, Any], more: tuple[str, ...]) -> None:
    file, out = tmp_path / "lmcache.yaml", tmp_path / "kv.yaml"
    file.write_text(yaml.safe_dump(fields))
    out.unlink(missing_ok=True)
    result = CliRunner().invoke(APP, ["config", "import", str(file), "-o", str(out), *more])
    if isinstance(result.exception, ConfigError):  # which `main` prints, a line for each field, with exit status 2
        assert len(str(result.exception).splitlines()) <= max(1, len(fields)) and not out.exists()
        return
    left = "no counterpart (" in result.stderr or "unknown (" in result.stderr
    assert result.exit_code == (1 if "--strict" in more and left else 0), result.exception
    names = [line.split()[2].rstrip(":") for line in out.read_text().splitlines() if line.startswith("# Set ")]
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "x"))
    try:
        EngineConfig.from_file(out)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.text("{}[]:,&*!|>-#'\"%@ \n\tab0.~", max_size=30).map(str.encode))
@pytest.mark.parametrize("prefix", [b"", b"chunk_size: "])
def test_any_bytes_are_a_configuration_or_a_line(tmp_path: Path, prefix: bytes, text: bytes) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_bytes(prefix + text)
    result = CliRunner().invoke(APP, ["config", "import", str(file)])
    if result.exit_code:
        assert isinstance(result.exception, ConfigError) and len(str(result.exception).splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    ["[" * 1200, "extra_config: &a {b: *a}", "blend_check_layers: &a [*a]", "chunk_size: 2001-99-99",
     "chunk_size: " + "9" * 5000, "? [a]\n: b", "a\0b: 1", "chunk_size: 0", "max_local_cpu_size: 1.0e-9",
     "blocking_timeout_secs: 0", "extra_config: {protocol: {a: b}}\nremote_url: mooncakestore://m:1"],
)  # fmt: skip
def test_files_that_once_broke_something(tmp_path: Path, text: str) -> None:
    (tmp_path / "lmcache.yaml").write_text(text)
    result = CliRunner().invoke(APP, ["config", "import", str(tmp_path / "lmcache.yaml")])
    assert not result.exit_code or isinstance(result.exception, ConfigError), result.exception
    assert len(str(result.exception).splitlines()) == 1


def test_all_fields_that_are_wrong_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        import_config(
            {"chunk_size": "x", 3: 4, "local_disk": [1], "remote_url": 3, "enable_p2p": 1, "local_cpu": False}
        )
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == [
        "3", "chunk_size", "local_disk", "remote_url", "enable_p2p",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_local_cpu_size", 0), ("max_local_cpu_size", 10**8), ("blocking_timeout_secs", 0), ("chunk_size", 0),
     ("lmcache_instance_id", "")],
)  # fmt: skip
def test_what_cannot_work_here_is_named_as_the_field_that_it_comes_from(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        import_config({"local_disk": "/kv", field: value})
    assert str(error.value).startswith(f"{field}: ")


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(KNOWN.map(lambda name: f"LMCACHE_{name.upper()}"), TEXT, max_size=5))
def test_any_environment_is_a_configuration_or_a_line(environment: dict[str, str]) -> None:
    done, error = attempt(lambda: import_config(import_environment(environment)))
    assert done or error


def test_text_in_the_environment_is_taken_as_it_stands() -> None:
    assert import_environment({"LMCACHE_BLEND_SPECIAL_STR": " # # "}) == {"blend_special_str": " # # "}


def test_what_aliases_stand_for_is_bounded(tmp_path: Path) -> None:
    bomb = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9 if n else ['x'])}]" for n in range(9))
    with pytest.raises(ConfigError, match="MAX_LOCAL_CPU_SIZE"):
        import_environment({"LMCACHE_MAX_LOCAL_CPU_SIZE": bomb})
    path = tmp_path / "lmcache.yaml"
    path.write_text(bomb)
    error = CliRunner().invoke(APP, ["config", "import", str(path)]).exception
    assert isinstance(error, ConfigError) and "100000 values" in str(error)
