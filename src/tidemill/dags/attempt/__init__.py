"""The parts of a running attempt: the interface to its worker, its events, its yielded values, its result."""
