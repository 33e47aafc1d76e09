"""Dead letters: what they say, and how they are written, read and restored."""
