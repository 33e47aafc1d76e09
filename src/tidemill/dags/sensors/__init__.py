"""Sensors: tasks that wait for a condition without occupying a worker."""
