"""Delivers results, and says once when everything of a result is settled."""
