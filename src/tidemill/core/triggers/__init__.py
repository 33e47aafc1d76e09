"""What decides about triggers: life cycles, events, leases, conditions."""
