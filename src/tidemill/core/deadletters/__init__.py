"""The decisions about dead letters and their redrive."""
