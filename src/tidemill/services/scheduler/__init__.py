"""The scheduler: creates runs, decides which tasks may run and assigns slots, in turns of the store."""
