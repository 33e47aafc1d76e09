"""Inspects a running engine on demand: where messages are, which partitions are stalled, and what it waits for."""
