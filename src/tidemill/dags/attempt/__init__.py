"""What a running attempt stands on: the interface to its worker, its events, its result."""
