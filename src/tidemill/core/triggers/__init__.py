"""The decisions about triggers: life cycles, events, leases, conditions."""
