"""The trigger host: a process that runs a list of triggers over the store."""
