"""What was recorded: messages, tasks, failures, events, recordings. A section of its own, over files and memory."""
