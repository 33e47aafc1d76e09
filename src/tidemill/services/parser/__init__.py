"""The parser: reads each DAG file in a separate process and stores the DAGs."""
