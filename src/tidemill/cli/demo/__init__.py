"""`tidemill demo`: a real pipeline, from scratch to a checked result."""
