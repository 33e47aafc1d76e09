"""Spark's JVM, its session, and what is sent to it."""
