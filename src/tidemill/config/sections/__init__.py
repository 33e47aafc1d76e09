"""The sections of the configuration."""
