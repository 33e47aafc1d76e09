"""Operators: what tasks do."""
