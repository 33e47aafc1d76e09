"""The driver of a live pipeline: one supervised engine per slot."""
