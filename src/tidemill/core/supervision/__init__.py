"""The decisions about engines: when they start, are replaced and end."""
