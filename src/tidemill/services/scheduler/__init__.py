"""The scheduler: creates runs, decides which tasks may run, and gives out slots, by turns of the store."""
