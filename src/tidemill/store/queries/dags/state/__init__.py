"""The state of tasks and runs: their rows, and the transitions that alone change them."""
