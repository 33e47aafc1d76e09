"""The process of `tidemill dev`: opens the store, runs scheduler and parser, and keeps worker and triggerer running.

On SQLite it is the one writer of the store, and answers the calls of the others. SIGTERM and SIGINT stop it: the
worker finishes what it runs for a while, then everything ends; a second one ends it at once.

Invariants: what an earlier process had, and did not finish, is free before anything is started; a service that ended is
noticed at once, and what it held is free before it runs again; nothing of this tree outlives this process.
"""
