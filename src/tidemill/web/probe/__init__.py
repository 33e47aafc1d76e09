"""Probes: a message that goes through the handler of a running engine, and leaves nothing behind."""
