"""`tidemill dev`: all services for DAGs on one machine, in one tree of processes."""
