"""A small component of each kind that meets every requirement: what the kit is tried on, and what to start from."""
