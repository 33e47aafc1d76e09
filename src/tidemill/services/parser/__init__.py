"""The parser: reads DAG files, each in a process of its own, and stores what they define."""
