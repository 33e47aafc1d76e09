"""Triggers that ship: what most want to wait for, by classpath."""
