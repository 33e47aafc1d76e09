"""Runs triggers on one event loop, both those of a list and those of deferred tasks."""
