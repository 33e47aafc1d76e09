"""The items that tasks are mapped over: how they are stored, found and read."""
