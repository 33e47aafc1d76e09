"""What users change: tasks of runs, and pools."""
