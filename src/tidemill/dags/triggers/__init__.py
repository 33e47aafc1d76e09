"""Triggers of tasks: their text, their stream keys, and tasks that start in one."""
