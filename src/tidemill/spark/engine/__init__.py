"""What runs inside a Spark Python worker."""
