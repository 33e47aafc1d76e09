"""What decides about dead letters and their redrive."""
