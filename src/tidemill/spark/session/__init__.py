"""Spark's JVM, its session, and the code that is shipped to it."""
