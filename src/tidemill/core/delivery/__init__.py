"""The decisions about delivery to sinks: batches, retries, breakers, transactions, statements."""
