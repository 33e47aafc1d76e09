"""The structure of a DAG as plain values."""
