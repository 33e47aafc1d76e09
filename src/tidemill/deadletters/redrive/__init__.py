"""Sends dead letters again."""
