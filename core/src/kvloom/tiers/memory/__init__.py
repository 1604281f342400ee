"""The memory tier: sealed chunks in the host pool, and staging buffers."""
