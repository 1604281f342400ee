"""Makes an `EngineConfig` from YAML, environment variables or Python, and finds the plugins that it names.

Two passes. The first checks the core's own shape; it knows no plugin. The second, `resolve`, checks each block against
the settings of the plugin that it names.
"""

from __future__ import annotations

from kvloom.config.blocks import BlendBlock, ComponentBlock, MemoryBlock, SerializerBlock, StoredBlock
from kvloom.config.components import BlendChoice, Choice, TierChoice, same_store
from kvloom.config.model import EngineConfig
from kvloom.config.resolve import Resolved, check_config, resolve

__all__ = [
    "BlendBlock",
    "BlendChoice",
    "Choice",
    "ComponentBlock",
    "EngineConfig",
    "MemoryBlock",
    "Resolved",
    "SerializerBlock",
    "StoredBlock",
    "TierChoice",
    "check_config",
    "resolve",
    "same_store",
]
