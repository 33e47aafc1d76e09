"""What an engine records of its messages, its tasks, and what goes wrong."""
