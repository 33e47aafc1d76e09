"""Runs the triggers of deferred tasks."""
