"""Hosts triggers, those of a list and those of deferred tasks alike."""
