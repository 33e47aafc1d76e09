"""Output for terminals: status lines, tables and progress."""
