"""The driver of a live pipeline: one supervised engine for each slot."""
