"""Looks into a running engine when somebody asks: where messages are, what stands still, what it waits for."""
