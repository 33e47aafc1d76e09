"""`tidemill send` and `tidemill consume`: the messages of a topic."""
