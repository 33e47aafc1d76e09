"""Files of this user: folders, locks, and changes of saved code."""
