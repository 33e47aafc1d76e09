"""One revision per file, in order."""
