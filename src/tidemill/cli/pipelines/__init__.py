"""Commands for pipelines: run one, watch it, and control it."""
