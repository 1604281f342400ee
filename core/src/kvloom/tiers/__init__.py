"""Where KV is kept: the memory tier, and stored tiers (backend, serializer, index)."""
