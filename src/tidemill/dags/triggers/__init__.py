"""What DAGs need of triggers: their text, their stream keys, and tasks that start in one."""
