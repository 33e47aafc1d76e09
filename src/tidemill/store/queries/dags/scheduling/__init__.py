"""When runs are created and when they start."""
