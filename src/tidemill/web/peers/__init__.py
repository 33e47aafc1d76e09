"""Queries the web UIs of other hosts for their recordings."""
