"""Web UIs of other hosts, asked for what they have recorded."""
