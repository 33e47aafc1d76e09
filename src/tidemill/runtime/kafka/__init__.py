"""Kafka without pipelines: clients, the producer, topics read from outside, the source message."""
