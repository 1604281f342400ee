"""What `Engine.retrieve_layer` and `Engine.store_layer` return: KV that moves layer by layer, beside the computation.

with engine.retrieve_layer(tokens, mask, kv=kv) as loading:     with engine.store_layer(tokens, kv=kv) as storing:
    for layer, mask in loading:                                     for layer in range(num_layers):
        compute(layer)  # of the tokens that mask lacks                 compute(layer)
                                                                        storing.layer(layer)
                                                                    storing.finish()
"""

from __future__ import annotations

from kvloom.contracts.connector import GPUConnector
from kvloom.layers.loading import Loading
from kvloom.layers.storing import Storing
from kvloom.types import MemoryFormat

__all__ = ["Loading", "Storing", "check_connector"]


def check_connector(connector: GPUConnector, method: str) -> None:
    """Raise NotImplementedError unless the connector has that optional method, and chunks that have layers."""
    if getattr(type(connector), method) is getattr(GPUConnector, method):
        raise NotImplementedError(f"connector {connector.type!r} does not move single layers: it has no {method}")
    if connector.format is not MemoryFormat.KV_BLOB:
        raise NotImplementedError(f"connector {connector.type!r} has {connector.format.name}, which has no layers")
