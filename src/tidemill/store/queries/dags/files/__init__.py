"""DAG files, and the DAGs in them."""
