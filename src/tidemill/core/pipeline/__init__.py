"""The decisions of one pipeline engine: windows, tasks, backpressure, order, the failure brake."""
