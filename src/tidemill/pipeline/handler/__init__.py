"""What users write against: handler, models, cache, periodic hooks."""
