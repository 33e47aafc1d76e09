"""Decisions about the tasks of DAGs: state transitions, dependencies, timetables and slots."""
