"""The code that runs inside a Spark Python worker."""
