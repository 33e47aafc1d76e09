"""What decides about shared streams: members, fan-out, redelivery, positions."""
