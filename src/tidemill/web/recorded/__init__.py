"""Recordings in the web UI: messages, tasks, failures and events, read from files and memory."""
