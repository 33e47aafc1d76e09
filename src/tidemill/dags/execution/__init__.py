"""Runs an attempt of a task."""
