"""Further errors of a configuration that has some already, so that one attempt shows everything."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kvloom.config.blocks import BlendBlock, ComponentBlock, MemoryBlock, PluginsBlock, StoredBlock, TierBlock
from kvloom.config.components import Checks
from kvloom.config.cross_checks import cross_checks
from kvloom.config.validation_errors import KeyPath, Origins, Problem
from kvloom.plugins.registry import Registry

_tier: TypeAdapter[MemoryBlock | StoredBlock] = TypeAdapter(TierBlock)
_block: TypeAdapter[ComponentBlock] = TypeAdapter(ComponentBlock)
_blend: TypeAdapter[BlendBlock] = TypeAdapter(BlendBlock)


def further_errors(tree: Mapping[str, Any], found: Sequence[Problem], origins: Origins) -> list[Problem]:
    """Problems beside `found`: conflicts between settings, and objections of the plugins to their blocks."""
    return [*_cross_check_errors(tree, found), *_plugin_errors(tree, found, origins)]


def _cross_check_errors(tree: Mapping[str, Any], found: Sequence[Problem]) -> list[Problem]:
    blocks = tree.get("tiers")
    if not isinstance(blocks, list | tuple):
        return []
    wrong: dict[int, set[str]] = {}
    for path, _ in found:
        if len(path) > 2 and path[0] == "tiers":
            wrong.setdefault(int(path[1]), set()).add(str(path[2]))
    tiers = []
    for index, block in enumerate(blocks):
        tiers.append(_sound(block, [(key,) for key in wrong.get(index, ())], _tier))
    known = {path for path, _ in found}
    others = [(("tiers", *below), text) for below, text in cross_checks(tiers, wrong=wrong)]
    return [(path, text) for path, text in others if path not in known]


def _plugin_errors(tree: Mapping[str, Any], found: Sequence[Problem], origins: Origins) -> list[Problem]:
    """The second pass over whichever blocks can be made out without the settings that are wrong."""
    blocks: list[tuple[KeyPath, str, Any]] = [
        ((name,), name, tree[name]) for name in ("tokens", "connector") if name in tree
    ]
    for name, kind in (("tiers", "tier"), ("observers", "observer")):
        if isinstance(several := tree.get(name), list | tuple):
            blocks += [((name, index), kind, block) for index, block in enumerate(several)]
    if tree.get("blend"):
        blocks.append((("blend",), "blend", tree["blend"]))
    try:
        plugins = PluginsBlock.model_validate(tree.get("plugins", {}))
    except ValidationError:  # which of them may load is not known
        plugins = PluginsBlock()
    checks: Checks | None = None
    for at, kind, block in blocks:
        below = [path[len(at) :] for path, _ in found if path[: len(at)] == at]
        if ("type",) in below or ("executor",) in below:  # which plugin is not known
            continue
        adapter: TypeAdapter[Any] = _tier if kind == "tier" else _blend if kind == "blend" else _block
        sound = _sound(block, below, adapter)
        if sound is None or isinstance(sound, MemoryBlock):
            continue
        checks = checks or Checks(_installed(plugins.only, plugins.block), origins)
        if isinstance(sound, StoredBlock):
            checks.tier(at, sound)
        elif isinstance(sound, BlendBlock):
            checks.blend(sound)
        else:
            checks.block(at, kind, sound)
    known = {path for path, _ in found}
    return [(path, text) for path, text in checks.problems if path not in known] if checks else []


@cache
def _installed(only: tuple[str, ...] | None, block: tuple[str, ...]) -> Registry:
    return Registry.discover(only=only, block=block)


def _sound(block: Any, wrong: Collection[KeyPath], adapter: TypeAdapter[Any]) -> Any:
    """A block without the settings at the wrong paths; None if it is still not valid."""
    # Without a part of it, a setting may be wrong still: `protect` for lack of keys, a `quota` that is empty.
    # A `retriever` is not left out: there is one by default, which may not work without settings.
    for paths in (wrong, [path[:1] for path in wrong if path[:1] != ("retriever",)]):
        for path in paths:
            block = _without(block, path)
        try:
            return adapter.validate_python(block)
        except ValidationError:
            continue
    return None


def _without(node: Any, path: KeyPath) -> Any:
    """`node` without the part at `path`; for a list, without all of it."""
    if not path or not isinstance(node, Mapping) or path[0] not in node:
        return node
    rest = _without(node[path[0]], path[1:]) if isinstance(node[path[0]], Mapping) and len(path) > 1 else None
    kept = {key: value for key, value in node.items() if key != path[0]}
    return kept if rest is None else {**kept, path[0]: rest}
