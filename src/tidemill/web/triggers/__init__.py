"""The web UI of a trigger host: its triggers, its shared streams, and its recordings."""
