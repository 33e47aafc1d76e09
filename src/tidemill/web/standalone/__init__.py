"""A web UI without a pipeline: what was recorded, read-only."""
