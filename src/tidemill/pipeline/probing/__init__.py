"""Runs single messages through the handler of a running engine, alongside its own work and without side effects."""
