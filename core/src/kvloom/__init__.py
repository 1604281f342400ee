"""kvloom keeps the KV cache of a language model outside the GPU. These are the public names, and nothing else.

They are imported on first use, so that a storage plugin or `kvloom --help` never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "plugins.hookspecs": "hookimpl",
    "engine.engine": "Engine",
    "engine.lookup": "Index",
    "engine.builder": "open_tier",
    "pipeline.task": "Task",
    "pipeline.layer_load": "Loading",
    "pipeline.layer_store": "Storing",
    "tiers.memory.index": "Changes",
    "config": "check_config EngineConfig",
    "config.validation_errors": "validated",
    "config.sources": "load_yaml",
    "plugins.kinds": "KINDS",
    "plugins.registry": "Registry",
    "plugins.installing": "pip_install",
    "tiers.tier": "Tier",
    "contracts.component": "ByteSize Component Config Duration",
    "contracts.storage": "join MappedBlob NativeSink ReadDone Sink StorageBackend WriteDone",
    "contracts.serializer": "Place Serializer",
    "contracts.connector": "Fence GPUConnector",
    "contracts.tokens": "TokenDatabase",
    "contracts.observer": "ChunkEvent CounterKey Event EventName Observer Request Step Totals Watched",
    "contracts.blend": (
        "BlendEngine BlendExecutor BlendLoading BlendOutput BlendRequest BlendRetriever BlendRetrieverResult "
        "BlendRetrieverTask BlendSession"
    ),
    "types": (
        "Buffer Buffers canonical_json Chunk ChunkKey Entry EXACT Health Hit KVSpec MemoryFormat Segment TierHealth"
    ),
    "bounded": "get_at_most one_line text_of",
    "files": "check_folder replace_file",
    "redaction": "is_secret",
    "interrupts": "uninterrupted",
    "keys": "chain fingerprint int32_tokens leading pieces salt_tag salt_tag_of select",
    "errors": (
        "BackendError ConfigError CorruptBlobError DeadlineExceeded IncompleteListingError KVLoomError "
        "LaterVersionError PartDownError PluginError UnreadableBlobError"
    ),
}
"""Names by the module that they are in."""
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = {"envelope": "format.envelope", "inspection": "inspection", "native": "native", "output": "cli.output"}

__all__ = sorted([*_HOME, *_MODULES, "__version__"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"kvloom.{_MODULES[name]}")
    if name not in _HOME:
        raise AttributeError(f"module 'kvloom' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kvloom.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)


if TYPE_CHECKING:
    from kvloom import inspection as inspection
    from kvloom import native as native
    from kvloom.bounded import get_at_most as get_at_most
    from kvloom.bounded import one_line as one_line
    from kvloom.bounded import text_of as text_of
    from kvloom.cli import output as output
    from kvloom.config import EngineConfig as EngineConfig
    from kvloom.config import check_config as check_config
    from kvloom.config.sources import load_yaml as load_yaml
    from kvloom.config.validation_errors import validated as validated
    from kvloom.contracts.blend import BlendEngine as BlendEngine
    from kvloom.contracts.blend import BlendExecutor as BlendExecutor
    from kvloom.contracts.blend import BlendLoading as BlendLoading
    from kvloom.contracts.blend import BlendOutput as BlendOutput
    from kvloom.contracts.blend import BlendRequest as BlendRequest
    from kvloom.contracts.blend import BlendRetriever as BlendRetriever
    from kvloom.contracts.blend import BlendRetrieverResult as BlendRetrieverResult
    from kvloom.contracts.blend import BlendRetrieverTask as BlendRetrieverTask
    from kvloom.contracts.blend import BlendSession as BlendSession
    from kvloom.contracts.component import ByteSize as ByteSize
    from kvloom.contracts.component import Component as Component
    from kvloom.contracts.component import Config as Config
    from kvloom.contracts.component import Duration as Duration
    from kvloom.contracts.connector import Fence as Fence
    from kvloom.contracts.connector import GPUConnector as GPUConnector
    from kvloom.contracts.observer import ChunkEvent as ChunkEvent
    from kvloom.contracts.observer import CounterKey as CounterKey
    from kvloom.contracts.observer import Event as Event
    from kvloom.contracts.observer import EventName as EventName
    from kvloom.contracts.observer import Observer as Observer
    from kvloom.contracts.observer import Request as Request
    from kvloom.contracts.observer import Step as Step
    from kvloom.contracts.observer import Totals as Totals
    from kvloom.contracts.observer import Watched as Watched
    from kvloom.contracts.serializer import Place as Place
    from kvloom.contracts.serializer import Serializer as Serializer
    from kvloom.contracts.storage import MappedBlob as MappedBlob
    from kvloom.contracts.storage import NativeSink as NativeSink
    from kvloom.contracts.storage import ReadDone as ReadDone
    from kvloom.contracts.storage import Sink as Sink
    from kvloom.contracts.storage import StorageBackend as StorageBackend
    from kvloom.contracts.storage import WriteDone as WriteDone
    from kvloom.contracts.storage import join as join
    from kvloom.contracts.tokens import TokenDatabase as TokenDatabase
    from kvloom.engine.builder import open_tier as open_tier
    from kvloom.engine.engine import Engine as Engine
    from kvloom.engine.lookup import Index as Index
    from kvloom.errors import BackendError as BackendError
    from kvloom.errors import ConfigError as ConfigError
    from kvloom.errors import CorruptBlobError as CorruptBlobError
    from kvloom.errors import DeadlineExceeded as DeadlineExceeded
    from kvloom.errors import IncompleteListingError as IncompleteListingError
    from kvloom.errors import KVLoomError as KVLoomError
    from kvloom.errors import LaterVersionError as LaterVersionError
    from kvloom.errors import PartDownError as PartDownError
    from kvloom.errors import PluginError as PluginError
    from kvloom.errors import UnreadableBlobError as UnreadableBlobError
    from kvloom.files import check_folder as check_folder
    from kvloom.files import replace_file as replace_file
    from kvloom.format import envelope as envelope
    from kvloom.interrupts import uninterrupted as uninterrupted
    from kvloom.keys import chain as chain
    from kvloom.keys import fingerprint as fingerprint
    from kvloom.keys import int32_tokens as int32_tokens
    from kvloom.keys import leading as leading
    from kvloom.keys import pieces as pieces
    from kvloom.keys import salt_tag as salt_tag
    from kvloom.keys import salt_tag_of as salt_tag_of
    from kvloom.keys import select as select
    from kvloom.pipeline.layer_load import Loading as Loading
    from kvloom.pipeline.layer_store import Storing as Storing
    from kvloom.pipeline.task import Task as Task
    from kvloom.plugins.hookspecs import hookimpl as hookimpl
    from kvloom.plugins.installing import pip_install as pip_install
    from kvloom.plugins.kinds import KINDS as KINDS
    from kvloom.plugins.registry import Registry as Registry
    from kvloom.redaction import is_secret as is_secret
    from kvloom.tiers.memory.index import Changes as Changes
    from kvloom.tiers.tier import Tier as Tier
    from kvloom.types import EXACT as EXACT
    from kvloom.types import Buffer as Buffer
    from kvloom.types import Buffers as Buffers
    from kvloom.types import Chunk as Chunk
    from kvloom.types import ChunkKey as ChunkKey
    from kvloom.types import Entry as Entry
    from kvloom.types import Health as Health
    from kvloom.types import Hit as Hit
    from kvloom.types import KVSpec as KVSpec
    from kvloom.types import MemoryFormat as MemoryFormat
    from kvloom.types import Segment as Segment
    from kvloom.types import TierHealth as TierHealth
    from kvloom.types import canonical_json as canonical_json
