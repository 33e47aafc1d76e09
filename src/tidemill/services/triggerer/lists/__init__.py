"""Runs a list of triggers: its file, its sessions, its triggers, and reloads."""
