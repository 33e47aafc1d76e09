"""Queries about the sessions of services: how they begin, beat and end, and their turns."""
