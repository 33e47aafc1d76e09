"""The named calls of the store: each is a request as a value, typed with its answer."""
