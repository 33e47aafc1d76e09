"""The task processes of a worker, as the worker sees them."""
