"""Mutants and oddities of token databases."""
