"""Commands for DAGs: show DAGs, runs and tasks, and change them."""
