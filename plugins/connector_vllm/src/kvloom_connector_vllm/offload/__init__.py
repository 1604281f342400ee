"""kvloom's tiers behind vLLM's own offloading."""
