"""`tidemill doctor`: checks what a pipeline needs."""
