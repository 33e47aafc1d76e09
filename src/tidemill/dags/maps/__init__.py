"""Mapped tasks and mapped groups."""
