"""The API for users' handlers: base class, models, cache, periodic hooks."""
