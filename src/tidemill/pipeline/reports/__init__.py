"""Reports of finished messages, and snapshots of an engine."""
