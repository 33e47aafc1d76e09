"""Shared streams: one poll for many triggers; this room never imports the store."""
