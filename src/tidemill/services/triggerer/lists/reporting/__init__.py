"""Reports on a list of triggers: metrics, health, pages and the recording."""
