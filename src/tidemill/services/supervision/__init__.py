"""Services in processes of their own: their supervision, restarts, and the trials of triggers that crash them."""
