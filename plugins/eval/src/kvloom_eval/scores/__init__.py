"""Scores of runs: rows on disk, their means and intervals, tables and charts."""
