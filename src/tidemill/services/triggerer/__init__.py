"""Runs triggers: the trigger host of a list, and the triggerer of deferred tasks."""
