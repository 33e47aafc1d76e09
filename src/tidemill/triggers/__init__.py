"""Triggers: small asynchronous waiters, many of them on one shared stream."""
