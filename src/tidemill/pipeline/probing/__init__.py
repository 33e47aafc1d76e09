"""Runs single messages through the handler of a running engine, beside its own work and without side effects."""
