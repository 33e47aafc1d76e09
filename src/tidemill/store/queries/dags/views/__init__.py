"""Reads tasks for display on the command line and web pages: lists, logs, counts, reasons to wait."""
