"""Tells of finished messages and of how an engine stands."""
