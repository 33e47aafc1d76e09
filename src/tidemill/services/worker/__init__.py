"""The process that runs the attempts of tasks, and the processes that it has forked for them."""
