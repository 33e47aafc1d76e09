"""The web UI: pages and a REST API, served from a thread of its own."""
