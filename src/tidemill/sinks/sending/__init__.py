"""Sends payloads to one sink in batches."""
