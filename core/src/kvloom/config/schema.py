"""The configuration as JSON schema for editors: closed over the plugins that are installed, as the check is not."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from kvloom.config.blocks import BlendBlock, MemoryBlock, SerializerBlock, StoredBlock
from kvloom.config.model import EngineConfig
from kvloom.plugins import Registry


class _Generator(GenerateJsonSchema):
    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        """What is parsed before it is checked may also be text, as in `deadline: 30s`."""
        inner = self.generate_inner(schema["schema"])
        return {"anyOf": [inner, {"type": "string"}]} if inner.get("type") == "number" else inner


def json_schema(registry: Registry) -> dict[str, Any]:
    """The JSON schema of a configuration file for the plugins in `registry`."""
    serializer = _union(_blocks(registry, "serializer", SerializerBlock))
    backends = _blocks(registry, "backend", StoredBlock, serializer=(serializer, "raw"))
    retriever = _union(_blocks(registry, "blend retriever"))
    executors = _blocks(registry, "blend executor", BlendBlock, word="executor", retriever=(retriever, "separator"))
    fields: dict[str, Any] = {
        "tokens": (_union(_blocks(registry, "tokens")), "chunked"),
        "connector": (_union(_blocks(registry, "connector")), "plain"),
        "tiers": _list_of(_union({"memory": MemoryBlock} | backends), ["memory"]),
        "observers": _list_of(_union(_blocks(registry, "observer")), []),
        "blend": (_union(executors, word="executor") | None if executors else None, None),
    }
    model = create_model("kvloom", __base__=EngineConfig, **fields)
    schema = model.model_json_schema(schema_generator=_Generator)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _blocks(
    registry: Registry, kind: str, core: type[BaseModel] | None = None, *, word: str = "type", **fields: Any
) -> dict[str, type[BaseModel]]:
    """For each type of `kind`, its settings and the core's keys in one model. word: the key that says which type."""
    blocks = {}
    for type_, cls in registry.types(kind).items():
        owned: dict[str, Any] = {}
        for name, field in core.model_fields.items() if core else ():
            owned[name] = (str, type_) if name == "name" else (field.annotation, field)
        owned[word] = (Literal[type_], ...)
        blocks[type_] = create_model(cls.__name__, __base__=cls.Config, **(owned | fields))
    return blocks


def _union(blocks: Mapping[str, type[BaseModel]], *, word: str = "type") -> Any:
    """One of the blocks, or the bare word for one that needs no settings; None if there are no blocks."""
    if not blocks:
        return None
    union: Any = reduce(or_, blocks.values())
    if len(blocks) > 1:
        union = Annotated[union, Field(discriminator=word)]
    words = [type_ for type_, block in blocks.items() if not _needed(block) - {word}]
    return Literal[tuple(words)] | union if words else union


def _needed(block: type[BaseModel]) -> set[str]:
    return {name for name, field in block.model_fields.items() if field.is_required()}


def _list_of(item: Any, default: list[str]) -> Any:
    return (list[item], default)
