"""Writes recordings: rows and events go to disk or memory, segments are sealed, old periods removed."""
