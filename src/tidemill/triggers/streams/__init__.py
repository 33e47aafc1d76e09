"""Shared streams: one poll for many triggers; never imports the store."""
