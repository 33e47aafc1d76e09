"""Runs one message through the handler of a running engine, beside its own work, and leaves nothing behind."""
