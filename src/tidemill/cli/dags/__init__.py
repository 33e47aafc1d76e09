"""The commands about DAGs: what there is, what runs, and what people change."""
