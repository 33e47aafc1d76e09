"""A task in, its result out; knows neither partitions nor windows."""
