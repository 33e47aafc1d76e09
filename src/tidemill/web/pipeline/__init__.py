"""The sections that a pipeline's driver mounts: overview, live page, configuration, actions."""
