"""Shared by every process: logs, locks, folders, Kafka clients, Java, the link between driver and engines."""
