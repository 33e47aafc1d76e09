"""Runs of DAGs: how they begin, how far they are, and when they are removed."""
