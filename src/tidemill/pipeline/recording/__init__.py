"""Records an engine's messages, tasks and failures."""
