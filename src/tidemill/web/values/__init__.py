"""A message as it is in its topic: key, headers and value, on demand."""
