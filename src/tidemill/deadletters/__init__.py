"""Dead letters: made, written, read and restored."""
