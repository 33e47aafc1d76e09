"""Queries about the triggers of lists, their events and the sessions that run them."""
