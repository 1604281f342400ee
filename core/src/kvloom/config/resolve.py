"""The second pass: each block against the plugin that it names."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.config.components import BlendChoice, Checks, Choice, TierChoice
from kvloom.config.model import EngineConfig
from kvloom.plugins.registry import Registry


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration that can work as far as can be told without opening anything."""

    tokens: Choice
    connector: Choice
    tiers: tuple[TierChoice, ...]
    observers: tuple[Choice, ...]
    blend: BlendChoice | None


def resolve(config: EngineConfig, registry: Registry, *, imported: bool = True) -> Resolved:
    """Find every plugin that `config` names and check its settings. Raises ConfigError with all problems.

    imported: import every class, which may load torch and an engine. Otherwise one whose hook names its settings is
    imported when its `Choice.cls` is asked for; only then is it known to work.
    """
    checks = Checks(registry, config.origins, imported=imported)
    checks.check_plugins(config.plugins.only or ())
    tokens = checks.block(("tokens",), "tokens", config.tokens)
    connector = checks.block(("connector",), "connector", config.connector)
    tiers = [checks.tier(("tiers", index), block) for index, block in enumerate(config.tiers)]
    observers = [checks.block(("observers", index), "observer", block) for index, block in enumerate(config.observers)]
    blend = checks.blend(config.blend) if config.blend else None
    checks.check_stores(tiers)
    if checks.problems:
        raise config.origins.error(checks.problems)
    return Resolved(tokens, connector, tuple(tiers), tuple(observers), blend)


def check_config(config: EngineConfig, *, imported: bool = True) -> Resolved:
    """Check `config` against the installed plugins without opening anything; raise ConfigError with all problems.

    imported: False checks settings without importing torch or an engine; it does not test whether each class can be
    imported.
    """
    registry = Registry.discover(only=config.plugins.only, block=config.plugins.block)
    return resolve(config, registry, imported=imported)
