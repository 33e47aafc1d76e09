"""JSON: values as text and back, and schema checks in bounded time."""
