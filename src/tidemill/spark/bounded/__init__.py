"""Runs with an end: backfills, DataFrames, dead letters in files."""
