"""Decisions of the flight recorder: when a segment is sealed, what is removed, which rows match."""
