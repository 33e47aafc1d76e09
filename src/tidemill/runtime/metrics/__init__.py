"""Metrics and health over HTTP, for every kind of process."""
