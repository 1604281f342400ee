"""The public verbs, and what an engine consists of."""
