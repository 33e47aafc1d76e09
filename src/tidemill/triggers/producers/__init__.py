"""Producers of shared streams, one file a broker."""
