"""Delivers results, and reports once when all payloads of a result are settled."""
