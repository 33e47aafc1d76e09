"""Windows of messages: from their arrangement to the outcome of each message, including failures."""
