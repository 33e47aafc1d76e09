"""Decisions about the tasks of DAGs: what each becomes, when it may run, and which ones get slots."""
