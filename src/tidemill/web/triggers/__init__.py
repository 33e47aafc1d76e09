"""The web UI of a trigger host: its triggers, its shared streams, and what it records."""
