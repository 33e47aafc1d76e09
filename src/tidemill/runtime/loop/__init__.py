"""Event loops: their tasks, calls from other threads, blocked loops, time budgets and durations."""
