"""The web UI of DAGs: runs, tasks, tries and logs, and the changes that users make."""
