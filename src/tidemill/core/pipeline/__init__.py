"""What decides inside one pipeline engine: windows, tasks, backpressure, order, the brake."""
