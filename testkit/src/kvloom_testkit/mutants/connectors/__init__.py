"""Mutants and oddities of connectors."""
