"""Bounded runs: backfills, DataFrames, dead letters in files."""
