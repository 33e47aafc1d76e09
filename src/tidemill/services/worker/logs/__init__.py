"""The logs of attempts, as a worker collects and stores them."""
