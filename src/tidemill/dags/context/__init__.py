"""What the code of a task sees: its context, connections, variables and macros."""
