"""Runs tasks and returns their results; knows neither partitions nor windows."""
