"""The service processes: thin shells around the core and the store."""
