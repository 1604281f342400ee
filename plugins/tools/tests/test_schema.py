"""`kvloom config schema`: everything that a configuration file may hold, for editors."""

from __future__ import annotations

import json

import pytest
from cli_support import run
from config_support import plugins_made_here

from kvloom import EngineConfig, Registry
from kvloom_tools.schema import json_schema


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    return plugins_made_here(monkeypatch)


def test_the_schema_is_closed_over_what_is_installed(registry: Registry) -> None:
    schema = json_schema(registry)
    json.dumps(schema)
    words, blocks = schema["properties"]["tiers"]["items"]["anyOf"]
    assert words["enum"] == ["memory", "dict", "shelf"]
    assert set(blocks["discriminator"]["mapping"]) == {"memory", "dict", "shelf"}
    shelf = schema["$defs"]["shelf"]
    assert shelf["additionalProperties"] is False
    assert {"shelf", "capacity", "serializer", "write", "deadline", "name", "type"} <= set(shelf["properties"])
    assert shelf["properties"]["type"]["const"] == "shelf"
    assert {"type": "string"} in shelf["properties"]["deadline"]["anyOf"], "30s"
    assert schema["properties"]["blend"]["type"] == "null", "nothing is installed that blends"


def test_what_the_schema_lists_is_what_the_config_has(registry: Registry) -> None:
    assert set(json_schema(registry)["properties"]) == set(EngineConfig.model_fields)


def test_every_key_of_the_schema_says_what_it_means() -> None:
    schema = json_schema(Registry.discover())
    capacity = schema["$defs"]["disk"]["properties"]["capacity"]
    assert capacity["description"] == "Maximum number of bytes in the tier."
    silent = [
        f"{name}.{key}"
        for name, model in (("file", schema), *schema["$defs"].items())
        for key, about in model.get("properties", {}).items()
        if key != "type" and not about.get("description")
    ]
    assert silent == []


def test_the_verb_prints_the_schema_of_what_is_installed() -> None:
    assert run("config", "schema").json == json_schema(Registry.discover())
