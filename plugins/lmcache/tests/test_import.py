"""`kvloom config import`: every field of LMCache's configuration is mapped, or it is said why not."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvloom import ConfigError, EngineConfig, Registry
from kvloom.cli.main import app
from kvloom_lmcache import import_config, import_environment
from kvloom_lmcache.fields import ALIASES, MAPPED, NOT_MAPPED

EXAMPLES = Path(__file__).parents[3] / "examples"


def brought(**fields: Any) -> tuple[dict[str, Any], dict[str, tuple[str, str]], bool]:
    """The imported configuration, the result and text of each field, and whether every field has a counterpart."""
    done = import_config(fields)
    EngineConfig.load(done.config)  # it is a configuration
    return done.config, {row.field: (row.outcome, row.text) for row in done.rows}, done.complete


def invoke(*arguments: str, **more: Any) -> Any:
    return CliRunner().invoke(app(), ["config", "import", *arguments], **more)


def test_the_example_gives_exactly_the_file_beside_it(tmp_path: Path) -> None:
    out = tmp_path / "kv.yaml"
    said = invoke(str(EXAMPLES / "lmcache.yaml"), "-o", str(out), "--strict")
    assert said.exit_code == 0 and out.read_text() == (EXAMPLES / "from_lmcache.yaml").read_text()
    assert EngineConfig.from_file(out).tiers[1].policy == "tiny_lfu"


@pytest.mark.parametrize(("seconds", "timeout"), [(0.25, "0.25s"), (3, "3s"), (5, None), (60, None)])
def test_a_start_does_not_warn_of_a_timeout_above_the_imported_deadline(seconds: float, timeout: str | None) -> None:
    for url in ("redis://kv:6379", "s3://bucket.s3.amazonaws.com", "mooncakestore://kv:50051/"):
        config, _, _ = brought(
            remote_url=url, blocking_timeout_secs=seconds, local_disk="/kv", max_local_disk_size=1,
            extra_config={"s3_region": "r"},
        )  # fmt: skip
        tiers = {tier["type"]: tier.get("timeout") for tier in config["tiers"]}
        assert tiers.pop("memory", None) is None and tiers.pop("disk") is None
        assert [*tiers.values()] == [timeout]
        fields = Registry.discover().settings("backend", *tiers).model_fields
        assert fields["timeout"].default == 5.0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"chunk_size": 128}, {"chunk_tokens": 128}),
        ({"max_local_cpu_size": 0.5}, {"tiers": [{"type": "memory", "capacity": "512MiB"}]}),
        (
            {"local_cpu": False, "local_disk": "/kv"},
            {"tiers": [{"type": "disk", "path": "/kv"}]},
        ),
        (
            {"local_cpu": False, "local_disk": "file:///kv", "max_local_disk_size": 2},
            {"tiers": [{"type": "disk", "path": "/kv", "capacity": "2GiB"}]},
        ),
        (
            {"local_cpu": False, "remote_url": "redis-sentinel://a:1,b:2/m"},
            {"tiers": [{"type": "redis", "url": "redis+sentinel://a:1,b:2/m", "serializer": "raw"}]},
        ),
        (
            {"local_cpu": False, "remote_url": "valkey://h:1", "remote_serde": "safetensor"},
            {"tiers": [{"type": "redis", "url": "redis://h:1", "serializer": "safetensors"}]},
        ),
        (
            {"local_cpu": False, "remote_url": "fs://host:0/mnt/kv"},
            {"tiers": [{"type": "fsspec", "url": "file:///mnt/kv", "serializer": "raw"}]},
        ),
        (
            {"local_cpu": False, "remote_url": "s3://bucket/kv", "remote_serde": "cachegen"},
            {
                "connector": "vllm_blob",
                "tiers": [{"type": "fsspec", "url": "s3://bucket/kv", "serializer": "cachegen"}],
            },
        ),
        (
            {"local_cpu": False, "remote_url": "mooncakestore://m:50051/", "extra_config": {"protocol": "rdma"}},
            {"tiers": [{"type": "mooncake", "master": "m:50051", "serializer": "raw", "protocol": "rdma"}]},
        ),
        (
            {"local_cpu": False, "enable_p2p": True, "lookup_url": "mooncake://m:50051", "max_local_cpu_size": 1},
            {"tiers": [{"type": "mooncake", "master": "m:50051", "segment": "1GiB"}]},
        ),
        (
            {
                "local_cpu": False,
                "local_disk": "/kv",
                "remote_url": "redis://h:1",
                "store_location": "LocalDiskBackend",
            },
            {
                "tiers": [
                    {"type": "disk", "path": "/kv"},
                    {"type": "redis", "url": "redis://h:1", "serializer": "raw", "write": "never"},
                ]
            },
        ),
        ({"save_unfull_chunk": False}, {"save_tails": False}),
        ({"enable_kv_events": True, "internal_api_server_enabled": True}, {"observers": ["events_zmq", "prometheus"]}),
    ],
)
def test_what_a_field_becomes(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    config, rows, complete = brought(**fields)
    for name, value in expected.items():
        assert config[name] == value
    assert {name.partition(".")[0] for name in rows} == set(fields) and complete


def test_every_field_at_its_default_is_told_of_and_loses_nothing() -> None:
    defaults = {**MAPPED, **{name: known.default for name, known in NOT_MAPPED.items()}}
    config, rows, complete = brought(**defaults)
    assert set(rows) == set(defaults) and complete
    assert config == {"connector": "vllm", "save_tails": False, "tiers": [{"type": "memory", "capacity": "5GiB"}]}


def test_the_end_of_a_prompt_is_kept_as_the_file_says() -> None:
    config, rows, complete = brought(save_unfull_chunk=True)
    assert rows["save_unfull_chunk"][0] == "mapped" and complete
    assert "save_tails" not in config, "that is the default"
    assert "save_tails" not in brought()[0], "as is that"
    assert brought(save_unfull_chunk=None)[0]["save_tails"] is False


@pytest.mark.parametrize("name", [name for name, known in NOT_MAPPED.items() if known.outcome == "no counterpart"])
def test_what_has_no_counterpart_is_said_with_the_reason(name: str) -> None:
    _, rows, complete = brought(**{name: "something"})
    outcome, why = rows[name]
    assert outcome == "no counterpart" and len(why) > 10 and not complete


def test_older_names_are_known() -> None:
    for old in ALIASES:
        _, rows, _ = brought(**{old: "x"})
        assert rows[old][0] == "no counterpart"


def test_a_field_that_is_not_one_is_said_with_a_guess() -> None:
    _, rows, complete = brought(chunksize=256)
    assert rows["chunksize"] == ("unknown", "no field of LMCache 0.5; did you mean 'chunk_size'?") and not complete


def test_a_field_with_a_dot_in_its_name_is_one_field() -> None:
    _, rows, complete = brought(**{"a.b": 1})
    assert rows["a.b"][0] == "unknown" and not complete


@pytest.mark.parametrize(("master", "complete"), [("mooncake://m:1", True), ("mooncake://n:1", False)])
def test_a_pool_that_is_named_twice_is_one_tier(master: str, complete: bool) -> None:
    config, rows, whole = brought(
        local_cpu=False, remote_url="mooncakestore://m:1", enable_p2p=True, lookup_url=master, max_local_cpu_size=1
    )
    (tier,) = config["tiers"]
    assert tier["master"] == "m:1" and ("segment" in tier) is complete and whole is complete
    assert rows["enable_p2p"][0] == ("mapped" if complete else "no counterpart")


@pytest.mark.parametrize("serde", ["naive", "cachegen"])
def test_a_store_without_a_plugin_takes_its_serde_with_it(serde: str) -> None:
    _, rows, complete = brought(remote_url="infinistore://h:1", remote_serde=serde)
    assert [rows[name][0] for name in ("remote_url", "remote_serde")] == ["no counterpart"] * 2 and not complete


def test_a_serde_without_a_remote_store_packs_no_disk_there_and_none_here() -> None:
    config, rows, complete = brought(local_disk="/kv", remote_serde="cachegen")
    assert "serializer" not in config["tiers"][1] and complete and config["connector"] == "vllm"
    assert "`serializer: cachegen` in the tier `disk`" in rows["remote_serde"][1]


@pytest.mark.parametrize("url", ["redis://h:1", "h:1", "http://h:1", None])
def test_the_lookup_server_of_lmcache_is_no_master_of_mooncake(url: str | None) -> None:
    config, rows, complete = brought(enable_p2p=True, lookup_url=url)
    assert [tier["type"] for tier in config["tiers"]] == ["memory"] and not complete
    assert rows["enable_p2p"][0] == "no counterpart" and "master" in rows["enable_p2p"][1]


@pytest.mark.parametrize(
    ("serde", "connector"),
    [("naive", "vllm"), ("torch", "vllm"), ("safetensor", "vllm"), ("cachegen", "vllm_blob")],
)
def test_pages_stay_as_they_are_where_the_serializer_takes_them(serde: str, connector: str) -> None:
    config, _, _ = brought(remote_url="redis://h:1", remote_serde=serde)
    assert config["connector"] == connector


def test_blending_needs_the_separators_token_ids() -> None:
    fields = {
        "enable_blending": True,
        "blend_recompute_ratios": [0.2],
        "blend_check_layers": [2],
        "blend_min_tokens": 64,
    }
    _, rows, complete = brought(**fields)
    assert "--tokenizer" in rows["enable_blending"][1] and not complete
    done = import_config(fields, separator=[5, 6])
    assert done.complete and done.config["blend"] == {
        "executor": "cacheblend", "recompute_ratio": 0.2, "check_layers": [2], "min_tokens": 64,
        "retriever": {"type": "separator", "separator": [5, 6]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "written"), [("vllm", "transformers"), ("vllm_blob", "transformers"), ("plain", "plain")]
)
def test_a_file_that_blends_names_the_connector_that_blends(asked: str, written: str) -> None:
    """KVLoomConnector refuses a block `blend`; KVLoomBlendConnector reads `connector: transformers`."""
    fields = {"enable_blending": True, "remote_url": "redis://h:1", "remote_serde": "cachegen"}
    done = import_config(fields, connector=asked, separator=[5])
    (row,) = [row for row in done.rows if row.field == "enable_blending"]
    assert done.config["connector"] == written
    assert ("KVLoomBlendConnector" in row.text) is (asked != written)
    assert import_config(fields, connector=asked).config["connector"] == {"vllm": "vllm_blob"}.get(asked, asked)


@pytest.mark.parametrize(
    ("name", "value", "setting", "expected"),
    [
        ("blend_recompute_ratios", 0.15, "recompute_ratio", 0.15),
        ("blend_recompute_ratios", "0.2,0.3", "recompute_ratio", 0.2),
        ("blend_check_layers", 1, "check_layers", [1]), ("blend_check_layers", "1, 2", "check_layers", [1, 2]),
    ],
)  # fmt: skip
def test_numbers_for_blending_in_every_form_that_lmcache_takes(
    name: str, value: Any, setting: str, expected: Any
) -> None:
    done = import_config({"enable_blending": True, name: value}, separator=[5])
    assert done.config["blend"][setting] == expected


def test_secrets_stay_where_they_are() -> None:
    done = import_config({"remote_url": "s3://b/kv", "extra_config": {"aws_secret_access_key": "geheim"}})
    assert "geheim" not in json.dumps(done.config) + "".join(row.text for row in done.rows)
    assert done.complete and list(done.environment) == ["AWS_SECRET_ACCESS_KEY"]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"chunk_size": "2"}, "chunk_size"), ({"chunk_size": True}, "chunk_size"), ({"local_cpu": "yes"}, "local_cpu"),
        ({"max_local_cpu_size": "5GB"}, "max_local_cpu_size"),
        ({"max_local_cpu_size": 10**400}, "max_local_cpu_size"), ({"max_local_disk_size": -1}, "max_local_disk_size"),
        ({"local_disk": 3}, "local_disk"), ({"remote_url": 3}, "remote_url"), ({"extra_config": []}, "extra_config"),
        ({"local_cpu": False}, "local_cpu"), ({3: 4}, "3"), ({"blocking_timeout_secs": None}, "blocking_timeout_secs"),
        ({"remote_url": "redis://[h:1"}, "remote_url"),
        ({"remote_url": "redis://h", "remote_serde": []}, "remote_serde"),
        ({"distributed_url": "a", "p2p_host": "b"}, "distributed_url"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_named(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as error:
        import_config(fields)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no field"),
        ("a: [", "is not YAML, line"),
        ("a: !!python/name:x", "has a tag that plain YAML has not, line 1"),
        ("chunk_size: 1\nchunk_size: 2", "chunk_size is given twice, in lines 1 and 2"),
        ("- 1", "should be a mapping"),
        ("\xff", "UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "lmcache.yaml"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    error = invoke(str(file)).exception
    assert isinstance(error, ConfigError) and words in str(error) and "\n" not in str(error)


def test_exit_status_and_json(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 128\nnuma_mode: auto\n")
    assert invoke(str(file)).exit_code == 0 and invoke(str(file), "--strict").exit_code == 1
    said = json.loads(invoke(str(file), "--json").stdout)
    assert said["config"]["chunk_tokens"] == 128 and not said["complete"]
    assert [row["outcome"] for row in said["fields"]] == ["mapped", "no counterpart"]
    assert isinstance(invoke().exception, ConfigError)


def test_the_environment_goes_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 128\nmax_local_cpu_size: 2\n")
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "64")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", "elsewhere.yaml")
    config = yaml.safe_load(invoke(str(file), "--env").stdout)
    assert config["chunk_tokens"] == 64 and config["tiers"] == [{"type": "memory", "capacity": "2GiB"}]
    assert import_environment({"LMCACHE_LOCAL_CPU": "False", "PATH": "x"}) == {"local_cpu": False}


def test_a_variable_that_is_no_yaml_is_named() -> None:
    with pytest.raises(ConfigError) as error:
        import_environment({"LMCACHE_CHUNK_SIZE": "a: [", "LMCACHE_LOCAL_CPU": "}"})
    assert str(error.value) == "LMCACHE_CHUNK_SIZE: is not YAML\nLMCACHE_LOCAL_CPU: is not YAML"


def test_all_that_is_wrong_is_said_at_once() -> None:
    fields = {
        "remote_url": "s3://b/x", "extra_config": {"s3_region": [1], "s3_file_prefix": [2], "disable_tls": False},
        "chunk_size": 0, "lmcache_instance_id": "", "blocking_timeout_secs": "x",
    }  # fmt: skip
    with pytest.raises(ConfigError) as error:
        import_config(fields)
    assert sorted(line.partition(": ")[0] for line in str(error.value).splitlines()) == [
        "blocking_timeout_secs", "chunk_size", "extra_config.s3_file_prefix", "extra_config.s3_region",
        "lmcache_instance_id",
    ]  # fmt: skip


def test_the_file_itself_is_not_written_over(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 16\n")
    error = invoke(str(file), "-o", str(tmp_path / "." / "lmcache.yaml")).exception
    assert isinstance(error, ConfigError) and "is LMCache's file" in str(error)
    assert file.read_text() == "chunk_size: 16\n"


def test_a_file_that_is_there_is_only_written_over_when_told_to(tmp_path: Path) -> None:
    file, mine = tmp_path / "lmcache.yaml", tmp_path / "kv.yaml"
    file.write_text("chunk_size: 16\n")
    mine.write_text("mine")
    error = invoke(str(file), "-o", str(mine)).exception
    assert isinstance(error, ConfigError) and "--force" in str(error) and mine.read_text() == "mine"
    assert invoke(str(file), "-o", str(mine), "--force").exit_code == 0 and "chunk_tokens: 16" in mine.read_text()


def test_rows_and_errors_name_fields_as_they_are_written() -> None:
    older = {"distributed_url": "10.0.0.2:8200", "enable_p2p": True, "lookup_url": "mooncake://a:1", "nixl_role": "x"}
    done = import_config(older)
    assert {row.field for row in done.rows} == set(older)
    assert "distributed_url" in done.sources["tiers/mooncake"] and "p2p_host" not in str(done.sources)


def test_an_unknown_store_is_told_of_those_that_kvloom_speaks_to() -> None:
    (row,) = (row for row in import_config({"remote_url": "infinistore://h:1"}).rows if row.field == "remote_url")
    assert "redis://" in row.text and "lm://" not in row.text


def test_lmcaches_own_server_has_no_counterpart(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("local_cpu: false\nremote_url: lm://h:65432\nremote_serde: null\n")
    said = invoke(str(file), "--json")
    assert said.exit_code == 0
    tiers = json.loads(said.stdout)["config"]["tiers"]
    assert tiers == [{"type": "redis", "url": "redis://h:65432", "serializer": "raw"}]
    rows = {row["field"]: row["outcome"] for row in json.loads(said.stdout)["fields"]}
    assert rows["remote_url"] == "mapped" and rows["remote_url.server"] == "no counterpart"
    strict = invoke(str(file), "--strict")
    assert strict.exit_code == 1 and "run a Redis at this address" in strict.stderr


@pytest.mark.parametrize("to", [".", "no/such.yaml"])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, to: str) -> None:
    error = invoke(str(EXAMPLES / "lmcache.yaml"), "-o", str(tmp_path / to)).exception
    assert isinstance(error, ConfigError) and "cannot be written" in str(error) and "\n" not in str(error)


WORDS = (
    st.none()
    | st.booleans()
    | st.integers(-1, 600)
    | st.floats()
    | st.text(max_size=8)
    | st.lists(st.integers(), max_size=2)
)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.sampled_from([*MAPPED, *NOT_MAPPED]), WORDS, max_size=6))
def test_whatever_is_given_is_a_configuration_or_one_line_that_names_a_field(fields: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        done = import_config(fields)
        assert {row.field.partition(".")[0] for row in done.rows} == set(fields)
        EngineConfig.load(done.config)


@pytest.mark.parametrize(("path", "moves"), [("kv", True), ("file://kv/", True), ("/kv", False), ("~/kv", False)])
def test_a_path_that_begins_elsewhere_is_pointed_out(path: str, moves: bool) -> None:
    _, rows, _ = brought(local_disk=path)
    outcome, text = rows["local_disk"]
    assert outcome == "mapped" and ("begins where the new file is" in text) == moves


def test_a_link_to_itself_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    said = invoke(str(tmp_path / "loop"), "-o", str(tmp_path / "out"))
    assert isinstance(said.exception, ConfigError) and "cannot be read" in str(said.exception)


def test_more_fields_than_any_release_has_are_refused() -> None:
    """Each unknown one is compared with all that are known."""
    for fields in ({f"field_{number}": 1 for number in range(5001)},
                   {"extra_config": {f"setting_{number}": 1 for number in range(5001)}}):  # fmt: skip
        with pytest.raises(ConfigError, match="fields: 5001 of them"):
            import_config(fields)
