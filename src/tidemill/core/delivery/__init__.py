"""Delivery to sinks: batches, retries, circuit breakers, transactions, SQL statements and HTTP requests."""
