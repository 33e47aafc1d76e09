"""What decides how payloads reach sinks: batches, retries, breakers, transactions, statements."""
