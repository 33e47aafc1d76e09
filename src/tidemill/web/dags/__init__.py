"""The web UI of DAGs: their runs, tasks, tries and logs, and what people change."""
