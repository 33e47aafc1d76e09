"""The decisions of the flight recorder: sealing, retention, sampling and counting."""
