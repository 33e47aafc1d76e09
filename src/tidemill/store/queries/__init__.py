"""Queries and updates of the store: plain functions over an open connection, inside its transaction."""
