"""The flight recorder stores the history of each message: one thread of the driver writes it, and readers may follow it
live.
"""
