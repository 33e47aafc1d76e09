"""Writes recordings: stores rows and events on disk or in memory, seals segments and removes old periods."""
