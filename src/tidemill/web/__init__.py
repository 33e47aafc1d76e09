"""The web UI: pages and a REST API over what a process knows, on a thread of its own."""
