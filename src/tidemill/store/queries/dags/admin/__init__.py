"""Changes that users make: clear and mark tasks, set pools."""
