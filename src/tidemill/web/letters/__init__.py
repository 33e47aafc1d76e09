"""Dead letters in the web UI: a list of matching letters, newest first, and a page for each letter."""
