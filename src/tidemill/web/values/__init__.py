"""A message's key, headers and value, read from its topic on demand."""
