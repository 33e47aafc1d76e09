"""Windows of messages: from their arrangement to the outcome of each message, and what becomes of failures."""
