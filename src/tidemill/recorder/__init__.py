"""The flight recorder: what happened to each message, written by one thread of the driver, read while it grows."""
