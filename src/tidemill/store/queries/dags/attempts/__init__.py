"""Attempts of tasks: admission, claims, and what they store while they run."""
