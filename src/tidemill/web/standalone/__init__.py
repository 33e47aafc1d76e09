"""A read-only web UI of recordings, without a pipeline."""
