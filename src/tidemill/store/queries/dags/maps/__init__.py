"""The scheduler's steps for mapped tasks and mapped groups."""
