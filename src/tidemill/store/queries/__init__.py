"""Queries and updates of the store: plain functions that run on a connection inside its transaction."""
