"""Queries about trigger lists, their triggers and events, and the sessions that run them."""
