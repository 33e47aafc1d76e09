"""What decides when engines start, are replaced and end."""
