"""Shared by the tests of the core."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("kvloom", deadline=None, max_examples=60)
settings.load_profile("kvloom")
