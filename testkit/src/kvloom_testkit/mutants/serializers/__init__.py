"""Mutants and oddities of serializers."""
