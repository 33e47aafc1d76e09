"""Logs: one entry per event on standard error, for people or as JSON, and where in user code an error arose."""
