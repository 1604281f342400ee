"""Shared by the tests of the two halves."""

from halves_support import pretended

__all__ = ["pretended"]
