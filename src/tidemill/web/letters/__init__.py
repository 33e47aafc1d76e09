"""Dead letters in the web UI: the newest that match, and one with everything in it."""
