"""Operators: ready-made kinds of tasks."""
