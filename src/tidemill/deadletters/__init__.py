"""Dead letters: their content, and how they are written, read and restored."""
