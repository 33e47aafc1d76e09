"""The sessions of services: their leases, heartbeats and observers."""
