"""The values that runs are given and that tasks pass on."""
