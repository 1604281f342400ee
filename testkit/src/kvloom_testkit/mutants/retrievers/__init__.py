"""Mutants and oddities of retrievers."""
