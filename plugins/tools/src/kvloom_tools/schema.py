"""The configuration as JSON schema for editors: closed over the plugins that are installed, as the check is not."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from kvloom import EngineConfig, Registry
from kvloom.inspection import BlendBlock, MemoryBlock, SerializerBlock, StoredBlock


class _Generator(GenerateJsonSchema):
    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        """Allow text too for values that are parsed before they are checked, as in `deadline: 30s`."""
        inner = self.generate_inner(schema["schema"])
        return {"anyOf": [inner, {"type": "string"}]} if inner.get("type") == "number" else inner

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """With what the source says of each key, which editors show."""
        made = super().model_schema(schema)
        said = dict(_said(schema["cls"]))
        for name, about in made.get("properties", {}).items():
            if name in said:
                about.setdefault("description", said[name])
        return made


def _said(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """The string below each field of a model and of those that it is made from, the model's own last."""
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            try:
                (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
            except (OSError, TypeError, SyntaxError):  # made here, or by a plugin that has no source
                continue
            assert isinstance(node, ast.ClassDef)
            for field, after in zip(node.body, node.body[1:], strict=False):
                if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                    continue
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    yield field.target.id, inspect.cleandoc(str(after.value.value))


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
    said = dict(_said(core)) if core else {}
    for type_, settings in registry.all_settings(kind).items():
        owned: dict[str, Any] = {}
        for name, field in core.model_fields.items() if core else ():
            owned[name] = (str, type_) if name == "name" else (field.annotation, field)
        owned[word] = (Literal[type_], ...)
        blocks[type_] = create_model(type_, __base__=settings, **(owned | fields))
        for name, field in blocks[type_].model_fields.items():
            if name in said and name not in settings.model_fields:
                field.description = said[name]
        blocks[type_].model_rebuild(force=True)
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
