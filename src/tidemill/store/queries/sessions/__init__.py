"""Queries about service sessions: their start, heartbeats and end, and the turns of schedulers and workers."""
