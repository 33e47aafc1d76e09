"""Attempts of tasks: admission, claims, and the results of elements that one attempt runs."""
