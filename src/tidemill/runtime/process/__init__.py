"""Processes of this host: how they are started, found, signalled, cleaned up, and how they exit."""
