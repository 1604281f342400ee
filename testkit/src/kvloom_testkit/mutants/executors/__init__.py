"""Mutants and oddities of executors."""
