"""The zygote, which forks task and parse processes, and its client."""
