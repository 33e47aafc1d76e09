"""What every process uses: logs, locks, folders, Kafka clients, Java, the link between driver and engines."""
