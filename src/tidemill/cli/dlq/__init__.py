"""`tidemill dlq`: dead letters on the command line."""
