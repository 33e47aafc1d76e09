"""Reads recordings, even while they grow: searches rows and events, traces messages, exports and copies."""
