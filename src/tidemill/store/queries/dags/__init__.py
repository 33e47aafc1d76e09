"""Queries about DAGs, their runs and their tasks."""
