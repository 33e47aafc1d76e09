"""Producers of shared streams, one module per broker."""
