"""`tidemill triggers`: hosts triggers and shows their state."""
