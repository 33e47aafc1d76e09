"""The link between a driver and its engines: its frames, both of its ends, and the reports that travel over it."""
