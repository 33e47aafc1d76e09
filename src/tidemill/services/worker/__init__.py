"""The process that runs attempts of tasks, and the task processes that it forks for them."""
