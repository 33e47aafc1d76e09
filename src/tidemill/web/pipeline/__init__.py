"""What the driver of a pipeline mounts: overview, configuration, actions."""
