"""The tiers: the memory tier, and stored tiers (backend, serializer, index)."""
