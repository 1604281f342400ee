"""vLLM's classes around kvloom's. Everything that imports vLLM is in here, and is made for one range of versions."""

from .connector import KVLoomConnector

__all__ = ["KVLoomConnector"]
