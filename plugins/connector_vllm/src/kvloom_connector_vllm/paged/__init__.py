"""Connectors of paged KV: chunks to and from an engine's blocks."""
