"""Sensors: tasks that wait, and hold no worker meanwhile."""
