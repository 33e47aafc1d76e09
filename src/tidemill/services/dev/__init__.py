"""`tidemill dev`: all services of DAGs on one machine, as one tree of processes."""
