"""The embedded Kafka, and the Java and the jars that it and Spark need."""
