"""The context of a task, with connections, variables and macros, as its own code sees it."""
