"""Public support for testing handlers and pipelines; the pytest plugin is found by pytest itself."""
