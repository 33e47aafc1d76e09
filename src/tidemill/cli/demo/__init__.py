"""`tidemill demo`: a pipeline from nothing to a checked result."""
