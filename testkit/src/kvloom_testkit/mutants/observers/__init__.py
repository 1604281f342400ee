"""Mutants and oddities of observers."""
