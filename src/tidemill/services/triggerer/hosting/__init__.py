"""Runs triggers on one event loop: triggers of a list, or triggers of deferred tasks."""
