"""The named calls of the store: each a request as a value, with the type of its answer."""
